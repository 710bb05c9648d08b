"""Function that a forked process of a tool calls. Importing this module imports the libraries of the tools."""

import gc
import multiprocessing
import os
import resource
import runpy
import sys
from pathlib import Path

import torch

import projects_vil.analysis
import projects_vil.export
import projects_vil.inference
import projects_vil.visualization  # noqa: F401

# Garbage collections of the forked processes leave out what is imported here.
gc.freeze()


def run(
    script: Path, args: list[str], env: dict[str, str], root: Path, folder: Path, file_size: int | None = None
) -> None:
    """Run ``python SCRIPT ARGS`` in ``root``. Its output is in the files ``stdout`` and ``stderr`` in ``folder``.

    ``file_size`` limits the bytes of each written file, which simulates a full disk.
    """
    # As if Python had started the tool.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(root)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    sys.argv = [str(script), *args]
    runpy.run_path(str(script), run_name="__main__")
