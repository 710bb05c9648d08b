"""The processes of a run, started here or by torchrun."""

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from detectron2.utils import comm
from torch.distributed import DistNetworkError, FileStore, PrefixStore, Store, TCPStore
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from backbones import ConfigError
from projects_vil.utils import cleanup_on_failure, handling_signals, hidden_main_module, terminate

# How long processes wait for each other, for example while rank 0 evaluates or reads the data.
TIMEOUT = timedelta(minutes=30)
# Seconds that the other processes have to save and exit once one has ended.
GRACE_PERIOD = 60
# Seconds that machines wait for each other at the start.
START_TIMEOUT = 600
# Seconds after which a machine says whom it waits for; then after twice as many, and so on.
FIRST_NOTICE = 10


class DistributedEnv(NamedTuple):
    """A process among those of its run, as torchrun's environment variables describe it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class ProcessEnded(Exception):
    """A process of a run was killed.

    Args:
        message: one line.
        exit_status: the status that the tool ends with.
    """

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def distributed_env() -> DistributedEnv | None:
    """Return the environment of torchrun, or of a launcher that sets the same variables; None without one.

    Raises:
        ConfigError: if only some of the variables are set, or one is not a number.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        env = DistributedEnv(*(int(os.environ[name.upper()]) for name in DistributedEnv._fields))
        if env.world_size > 1:
            _ = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "torchrun sets the environment variables RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT, and here one is missing or wrong: {error}"
        ) from error
    return env


def number_of_processes(args: argparse.Namespace) -> int:
    """Return the number of processes of the whole run, by torchrun or by detectron2's arguments."""
    env = distributed_env()
    return args.num_gpus * args.num_machines if env is None else env.world_size


def check_processes(args: argparse.Namespace, *, device: str) -> None:
    """Raise a ConfigError if the processes that torchrun or detectron2's arguments ask for cannot run here.

    Args:
        args: parsed by detectron2's parser.
        device: ``MODEL.DEVICE``.
    """
    env, on_cpu = distributed_env(), device.startswith("cpu")
    if env is not None and (args.num_gpus != 1 or args.num_machines != 1):
        raise ConfigError(f"torchrun has started {env.world_size} processes: leave out --num-gpus and --num-machines")
    if not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--num-machines is {args.num_machines} and --machine-rank {args.machine_rank}: give one machine or more, "
            "and a rank from 0 that is below their number"
        )
    if args.num_machines > 1 and not re.fullmatch(r"tcp://(?!127\.0\.0\.1:)[^/]+:\d{1,5}", args.dist_url):
        needed = "tcp://HOST:PORT, where other machines reach the first one by HOST"
        raise ConfigError(f"--dist-url is {args.dist_url}: it must be {needed}")
    if number_of_processes(args) > 1 and ":" in device:
        raise ConfigError(f"the device is {device}: with several processes it must be {device.partition(':')[0]}")
    here = args.num_gpus if env is None else env.local_world_size
    available = max(os.cpu_count() or 1, 2) if on_cpu else max(torch.cuda.device_count(), 1)
    if not 0 < here <= available and not (on_cpu and env is not None):
        unit = "CPU cores" if on_cpu else "GPUs"
        raise ConfigError(f"--num-gpus is {here}: it must be 1 to {available}, the number of {unit} here")


def launch(run: Callable[[argparse.Namespace], Any], args: argparse.Namespace, *, output_dir: str, device: str) -> None:
    """Call ``run(args)`` in all processes of a run, over NCCL on GPUs and gloo on the CPU.

    They are the processes of torchrun, or as many as detectron2's arguments ask for; a single one is this process. When
    one ends, so do the others; SIGINT, SIGTERM and SIGHUP are passed on to all.

    Args:
        run: a function that can be imported.
        args: parsed by detectron2's parser.
        output_dir: the folder of the run, which is created, and removed where it was new and the run does not begin.
        device: ``MODEL.DEVICE``.

    Raises:
        ConfigError: if the folder cannot be created, and as ``run`` in one of the processes.
        ProcessEnded: if a process was killed.
        ProcessRaisedException: torch's, with the traceback of a process, for any other exception.
        SystemExit: with 128 and the number of the signal that stopped the run.
    """
    env = distributed_env()
    with cleanup_on_failure(Path(output_dir)):
        if number_of_processes(args) == 1:
            run(args)
        elif env is not None:
            with _process_group(env, device, f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", args):
                run(args)
        else:
            with tempfile.TemporaryDirectory() as folder:
                url = args.dist_url if args.num_machines > 1 else f"file://{folder}/store"
                _spawn(run, args, device, url)


def _spawn(run: Callable, args: argparse.Namespace, device: str, url: str) -> None:
    processes: list[BaseProcess] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and number in received
        received.append(number)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL if is_second else number)

    with handling_signals(pass_on):
        # CUDA and OpenMP's threads do not survive a fork.
        worker_args = (run, args, device, url)
        with hidden_main_module():
            context = start_processes(_worker, worker_args, nprocs=args.num_gpus, join=False, start_method="spawn")
        processes += context.processes
        for number in received[:1]:
            pass_on(number, None)
        try:
            while not context.join(grace_period=GRACE_PERIOD):
                pass
        except ProcessRaisedException as error:
            # Only the text of the exception of a process arrives here.
            _, is_ours, message = str(error).rpartition(f"{ConfigError.__module__}.{ConfigError.__qualname__}: ")
            if is_ours:
                raise ConfigError(message.strip()) from error
            raise
        except ProcessExitedException as error:
            if received or error.exit_code > 128:
                raise SystemExit(128 + received[0] if received else error.exit_code) from None
            reason = error.signal_name or f"exit status {error.exit_code}"
            hint = ", often because memory is short" if reason in ("SIGKILL", "SIGBUS") else ""
            raise ProcessEnded(
                f"process {error.error_index} of {args.num_gpus} was ended by {reason}{hint}",
                exit_status=abs(error.exit_code) + (128 if error.signal_name else 0),
            ) from None
        if received:
            # torch has processes that a second SIGINT interrupts, which a terminal sends to all, end with status 0.
            raise SystemExit(128 + received[0])


def _worker(local_rank: int, run: Callable, args: argparse.Namespace, device: str, url: str) -> None:
    # The default one: else data loading processes would be spawned too, as new interpreters, which take seconds.
    multiprocessing.set_start_method(None, force=True)
    rank, world_size = args.machine_rank * args.num_gpus + local_rank, args.num_gpus * args.num_machines
    status = None
    with handling_signals(terminate):
        try:
            with _process_group(DistributedEnv(rank, local_rank, world_size, args.num_gpus), device, url, args):
                run(args)
        except SystemExit as error:
            status = error.code
    if status is not None:
        # The first process passes on the Ctrl-C that a terminal has sent to all.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not in the handler: the traceback refers to data loaders, whose processes end with them.
    sys.exit(status)


@contextlib.contextmanager
def _process_group(env: DistributedEnv, device: str, url: str, args: argparse.Namespace) -> Iterator[None]:
    on_gpu = not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(env.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // env.local_world_size))
    # Ray Train makes the group itself.
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        store = _rendezvous(env, url, getattr(args, "dist_timeout", START_TIMEOUT))
        options = {"store": store, "rank": env.rank, "world_size": env.world_size, "timeout": TIMEOUT}
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **options)
    comm.create_local_process_group(env.local_world_size)
    comm.synchronize()
    yield
    # Not after an exception: the others may never come to it.
    if is_ours:
        torch.distributed.destroy_process_group()


def _rendezvous(env: DistributedEnv, url: str, timeout: float) -> Store:
    """Return a store for the processes of a run, once all have come.

    torchrun's store keeps the addresses of processes that it has started again since, and counts restarts on each
    machine for itself. So the first process draws a key for each start, all report under it, and go on at its word.

    Args:
        env: this process.
        url: ``tcp://HOST:PORT`` of the first machine, or ``file://PATH``.
        timeout: seconds after which this gives up.

    Raises:
        ConfigError: if the host has no address, or the port is taken, and after the timeout.
    """
    size = env.local_world_size
    machines = range(env.world_size // size)
    notice = FIRST_NOTICE if len(machines) > 1 else timeout
    begin, store, key, is_ours = time.monotonic(), None, "", False
    while True:
        store = store or _open_store(env, url, timeout)
        if store is not None:
            if env.rank == 0 and not key:
                store.set("start", f"{env.world_size} {os.urandom(8).hex()}")
            if store.check(["start"]) and (given := store.get("start").decode()) != key:
                key = given
                # Where another process of this rank has reported before, a new key is to come.
                is_ours = key.startswith(f"{env.world_size} ") and store.add(f"{key} {env.rank}", 1) == 1
            if env.rank == 0 and store.check([f"{key} {rank}" for rank in range(env.world_size)]):
                store.set(f"{key} all", "")
            if is_ours and store.check([f"{key} all"]):
                store.set_timeout(TIMEOUT)
                return PrefixStore(key, store)
        waited = time.monotonic() - begin
        if waited > min(notice, timeout) and env.local_rank == 0:
            # Its first process speaks for a machine.
            missing = [str(one) for one in machines if is_ours and not store.check([f"{key} {one * size}"])]
            whom = f"machine rank{'s' * (len(missing) > 1)} {', '.join(missing) or 0} of {len(machines)} at {url}"
            if waited > timeout:
                hint = "start the run on all with the same arguments but --machine-rank, and open the port to them"
                raise ConfigError(f"after {timeout:g} s (--dist-timeout) there is no answer from {whom}: {hint}")
            print(f"waiting for {whom}, for {waited:.0f} s of {timeout:g}", file=sys.stderr, flush=True)
            notice *= 2
        time.sleep(0.1)


def _open_store(env: DistributedEnv, url: str, timeout: float) -> Store | None:
    """Return the store at a URL; None while the first process does not answer."""
    address = urlsplit(url)
    if address.scheme == "file":
        return FileStore(address.path, env.world_size)
    # torchrun's own process has the store.
    is_server = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # TCPStore waits in C++, where Ctrl-C does not reach it.
        if not is_server:
            socket.create_connection((address.hostname, address.port), timeout=5).close()
        options = {"is_master": is_server, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        return TCPStore("localhost" if is_server else address.hostname, address.port, **options)
    except (socket.gaierror, DistNetworkError) as error:
        raise ConfigError(f"the first machine, {url}: {str(error).splitlines()[0]}") from error
    except OSError:
        return None
