"""Start the processes of a run, or join the processes that torchrun started."""

import contextlib
import dataclasses
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
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from detectron2.utils import comm
from torch.distributed import DistNetworkError, FileStore, PrefixStore, Store, TCPStore
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from backbones import ConfigError
from projects_vil.utils import cleanup_on_failure, handling_signals, hidden_main_module, terminate

# How long processes wait for each other, for example while rank 0 evaluates or reads the data.
TIMEOUT = timedelta(minutes=30)
# Seconds in which the other processes save and exit after one process has ended.
GRACE_PERIOD = 60
# Seconds until a machine reports which machines it waits for. The interval doubles with each report.
FIRST_NOTICE = 10


class DistributedEnv(NamedTuple):
    """The position of a process in its run, as torchrun's environment variables describe it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class ProcessEnded(Exception):
    """A process of a run was killed.

    Args:
        message: one line.
        exit_status: exit status of the command.
    """

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def distributed_env() -> DistributedEnv | None:
    """Return the environment that torchrun, or a launcher with the same variables, has set; None without one.

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
            "The environment variables of torchrun are incomplete: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            f"MASTER_ADDR and MASTER_PORT are needed, and one is missing or invalid ({error}). Start with torchrun, or "
            "unset RANK."
        ) from error
    return env


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run, with the arguments of detectron2's ``launch``. Under torchrun the defaults must stay.

    Attributes:
        num_gpus: processes on this machine, one per GPU, or on the CPU if that is the device.
        num_machines: number of machines.
        machine_rank: rank of this machine, from 0.
        dist_url: ``tcp://HOST:PORT`` of the first machine; only read for several machines.
        dist_timeout: seconds to wait for the other machines at the start.
    """

    num_gpus: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    dist_url: str = "auto"
    dist_timeout: float = 600

    @property
    def world_size(self) -> int:
        """The number of processes of the run on all machines."""
        env = distributed_env()
        return self.num_gpus * self.num_machines if env is None else env.world_size

    @property
    def is_first(self) -> bool:
        """Whether this process is, or starts, the process with rank 0."""
        env = distributed_env()
        return self.machine_rank == 0 if env is None else env.rank == 0

    def check(self, device: str) -> None:
        """Raise a ConfigError if the processes cannot run here.

        Args:
            device: ``MODEL.DEVICE``.
        """
        env, on_cpu = distributed_env(), device.startswith("cpu")
        if env is not None and (self.num_gpus != 1 or self.num_machines != 1):
            raise ConfigError(f"torchrun has started {env.world_size} processes. Remove --num-gpus and --num-machines.")
        if not 0 <= self.machine_rank < self.num_machines:
            raise ConfigError(
                f"--machine-rank {self.machine_rank} does not fit --num-machines {self.num_machines}. Ranks count from "
                "0."
            )
        if self.num_machines > 1 and not re.fullmatch(r"tcp://(?!127\.0\.0\.1:)[^/]+:\d{1,5}", self.dist_url):
            raise ConfigError(
                f"--dist-url is {self.dist_url}. With several machines it must be tcp://HOST:PORT, where HOST is the "
                "first machine."
            )
        if self.world_size > 1 and ":" in device:
            raise ConfigError(f"MODEL.DEVICE is {device}. Use {device.partition(':')[0]} with several processes.")
        here = self.num_gpus if env is None else env.local_world_size
        available = max(os.cpu_count() or 1, 2) if on_cpu else max(torch.cuda.device_count(), 1)
        if not 0 < here <= available and not (on_cpu and env is not None):
            unit = "CPU cores" if on_cpu else "GPUs"
            raise ConfigError(f"--num-gpus is {here}. This machine has {available} {unit}.")


def launch(run: Callable[..., object], arguments: tuple, processes: Processes, *, output_dir: str, device: str) -> None:
    """Call ``run(*arguments)`` in all processes of a run, over NCCL on GPUs and gloo on the CPU.

    A single process is this one. If one process ends, the others end too. SIGINT, SIGTERM and SIGHUP are passed on to
    all processes.

    Args:
        run: a function that can be imported.
        arguments: are pickled for new processes.
        processes: how many processes to start, or the defaults under torchrun.
        output_dir: output directory of the run. It is created, and deleted if it is new and the run does not start.
        device: ``MODEL.DEVICE``.

    Raises:
        ConfigError: if the output directory cannot be created, or if ``run`` raises it in a process.
        ProcessEnded: if a process was killed.
        ProcessRaisedException: torch's, with the traceback of a process, for any other exception.
        SystemExit: with 128 plus the number of the signal that stopped the run.
    """
    env = distributed_env()
    with cleanup_on_failure(Path(output_dir)):
        if processes.world_size == 1:
            run(*arguments)
        elif env is not None:
            url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            with _process_group(env, device, url, processes.dist_timeout):
                run(*arguments)
        else:
            with tempfile.TemporaryDirectory() as folder:
                url = processes.dist_url if processes.num_machines > 1 else f"file://{folder}/store"
                _spawn(run, arguments, processes, device, url)


def _spawn(run: Callable[..., object], arguments: tuple, processes: Processes, device: str, url: str) -> None:
    workers: list[BaseProcess] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and number in received
        received.append(number)
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGKILL if is_second else number)

    with handling_signals(pass_on):
        worker_args, count = (run, arguments, processes, device, url), processes.num_gpus
        # CUDA and OpenMP's threads do not survive a fork.
        with hidden_main_module():
            context = start_processes(_worker, worker_args, nprocs=count, join=False, start_method="spawn")
        workers += context.processes
        for number in received[:1]:
            pass_on(number, None)
        try:
            while not context.join(grace_period=GRACE_PERIOD):
                pass
        except ProcessRaisedException as error:
            # Only the text of the exception arrives here.
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
                f"process {error.error_index} of {count} was ended by {reason}{hint}",
                exit_status=abs(error.exit_code) + (128 if error.signal_name else 0),
            ) from None
        if received:
            # A process that a second SIGINT interrupts ends with status 0 in torch, and a terminal sends it to all.
            raise SystemExit(128 + received[0])


def _worker(
    local_rank: int, run: Callable[..., object], arguments: tuple, processes: Processes, device: str, url: str
) -> None:
    # The default: otherwise data loader workers are spawned too, as new interpreters, which takes seconds.
    multiprocessing.set_start_method(None, force=True)
    rank, count = processes.machine_rank * processes.num_gpus + local_rank, processes.num_gpus
    env = DistributedEnv(rank, local_rank, count * processes.num_machines, count)
    status = None
    with handling_signals(terminate):
        try:
            with _process_group(env, device, url, processes.dist_timeout):
                run(*arguments)
        except SystemExit as error:
            status = error.code
    if status is not None:
        # The parent process passes on the Ctrl-C that a terminal has sent to all.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Outside of the handler: the traceback refers to data loaders, whose processes end with them.
    sys.exit(status)


@contextlib.contextmanager
def _process_group(env: DistributedEnv, device: str, url: str, timeout: float) -> Iterator[None]:
    on_gpu = not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(env.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // env.local_world_size))
    # Ray Train creates the group itself.
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        store = _rendezvous(env, url, timeout)
        options = {"store": store, "rank": env.rank, "world_size": env.world_size, "timeout": TIMEOUT}
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **options)
    comm.create_local_process_group(env.local_world_size)
    comm.synchronize()
    yield
    # Not after an exception: the other processes may never reach this line.
    if is_ours:
        torch.distributed.destroy_process_group()


def _rendezvous(env: DistributedEnv, url: str, timeout: float) -> Store:
    """Wait for all processes of a run, and return a store for them.

    torchrun's store keeps the addresses of processes that it has restarted since, and each machine counts restarts
    separately. Therefore the first process sets a new key for each start, and all processes report under this key.

    Args:
        env: this process.
        url: ``tcp://HOST:PORT`` of the first machine, or ``file://PATH``.
        timeout: seconds.

    Raises:
        ConfigError: if the host has no address, if the port is in use, or after the timeout.
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
                # If another process of this rank has already reported, a new key follows.
                is_ours = key.startswith(f"{env.world_size} ") and store.add(f"{key} {env.rank}", 1) == 1
            if env.rank == 0 and store.check([f"{key} {rank}" for rank in range(env.world_size)]):
                store.set(f"{key} all", "")
            if is_ours and store.check([f"{key} all"]):
                store.set_timeout(TIMEOUT)
                return PrefixStore(key, store)
        waited = time.monotonic() - begin
        if waited > min(notice, timeout) and env.local_rank == 0:
            # The first process of each machine reports.
            missing = [str(one) for one in machines if is_ours and not store.check([f"{key} {one * size}"])]
            whom = f"machine rank{'s' * (len(missing) > 1)} {', '.join(missing) or 0} of {len(machines)} at {url}"
            if waited > timeout:
                raise ConfigError(
                    f"No answer from {whom} after {timeout:g} s (--dist-timeout). Start the run on all machines with "
                    "the same arguments except --machine-rank, and open the port."
                )
            print(f"waiting for {whom}, for {waited:.0f} s of {timeout:g}", file=sys.stderr, flush=True)
            notice *= 2
        time.sleep(0.1)


def _open_store(env: DistributedEnv, url: str, timeout: float) -> Store | None:
    """Return the store at a URL, or None while the first process does not answer."""
    address = urlsplit(url)
    if address.scheme == "file":
        return FileStore(address.path, env.world_size)
    # torchrun's own process serves the store.
    is_server = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # TCPStore waits in C++, where Ctrl-C has no effect.
        if not is_server:
            socket.create_connection((address.hostname, address.port), timeout=5).close()
        options = {"is_master": is_server, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        return TCPStore("localhost" if is_server else address.hostname, address.port, **options)
    except (socket.gaierror, DistNetworkError) as error:
        raise ConfigError(f"Cannot connect to the first machine at {url}: {str(error).splitlines()[0]}") from error
    except OSError:
        return None
