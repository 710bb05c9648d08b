"""Function that a forked process of a tool calls. Importing this module imports the libraries of the tools."""

import ctypes
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.run
from torch.distributed.launcher import LaunchConfig, elastic_launch
from torch.multiprocessing import start_processes

import projects_vil.analysis
import projects_vil.export
import projects_vil.inference
import projects_vil.visualization.predictions  # noqa: F401

# Garbage collections of the forked processes leave out what is imported here.
gc.freeze()


def fork_processes(*args, start_method: str, **options) -> torch.multiprocessing.ProcessContext:
    """Replace ``start_processes`` of the launcher. A spawned process would import all libraries again."""
    return start_processes(*args, start_method="fork", **options)


def run(
    script: Path,
    args: Sequence[str],
    env: dict[str, str],
    root: Path,
    folder: Path,
    file_size: int | None = None,
    torchrun: Sequence[str] | None = None,
    network: str | None = None,
) -> None:
    """Run ``python SCRIPT ARGS`` in a new session. Its output is in the files ``stdout`` and ``stderr`` in ``folder``.

    Args:
        script: Path of the tool.
        args: Arguments of the tool.
        env: Environment variables.
        root: Working directory.
        folder: Directory of the output.
        file_size: Maximum number of bytes of a file, which simulates a full disk.
        torchrun: Run ``torchrun TORCHRUN SCRIPT ARGS`` instead.
        network: Network namespace of the process.
    """
    # As if Python had started the tool.
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)
    # Background jobs and nohup ignore these signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(root)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if network is not None:
        with Path("/run/netns", network).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    with mock.patch("projects_vil.engine.launch.start_processes", fork_processes):
        if torchrun is None:
            _run_script(script, *args)
        else:
            with mock.patch("torch.distributed.run.elastic_launch", _launch_forks):
                torch.distributed.run.main([*torchrun, str(script), *args])


def _run_script(script: str | Path, *args: str) -> None:
    sys.argv = [str(script), *args]
    runpy.run_path(str(script), run_name="__main__")


def _launch_forks(config: LaunchConfig, entrypoint: str) -> Callable:
    """Replace ``elastic_launch`` of torchrun, which gets the arguments of a new interpreter: ``-u SCRIPT ARGS``."""
    config.start_method = "fork"
    return lambda _, script, *args: elastic_launch(config, _run_script)(script, *args)
