"""The processes of a run: started here, or by torchrun. What ends one of them ends all, with its reason."""

import argparse
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from detectron2.engine import create_ddp_model, default_argument_parser
from detectron2.utils import comm
from torch import nn
from torch.multiprocessing import ProcessRaisedException

from backbones import InputError
from projects_vil.utils import (
    RunEnded,
    end_by_signal,
    explain_ending,
    handling_signals,
    heeded_signals,
    process_ended,
)

# How long processes wait for each other, for one that writes a checkpoint or evaluates, say.
TIMEOUT = timedelta(minutes=30)
# Seconds that the others have, once a process has failed, to end with a reason of their own; and to end at all.
SECONDS_TO_FAIL, SECONDS_TO_END = 5.0, 10.0
# And where the run was told to stop, and is saving.
SECONDS_TO_SAVE = 60.0
# Characters that a pipe surely takes while nobody reads.
_LONGEST_REPORT = 10_000
# What torchrun tells a process that it starts.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def explain_processes(parser: argparse.ArgumentParser, *, device: str) -> None:
    """Let ``--help`` say what detectron2's ``--num-gpus`` is on a CPU.

    Args:
        device: what is added to a command to train on the CPU.
    """
    for action in parser._actions:
        if action.dest == "num_gpus":
            action.help = f"processes on this machine: one for each GPU, or, with {device}, so many on the CPU"


@dataclasses.dataclass(frozen=True)
class Place:
    """Of a process among those of its run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def torchrun_place() -> Place | None:
    """That of this process where torchrun has started it, or another launcher that sets the same variables.

    Raises:
        InputError: where only some of them are set, or are no numbers.
    """
    if not all(name in os.environ for name in _TORCHRUN[:3]):
        return None
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing:
        raise InputError(f"RANK is set, as by torchrun, and {missing[0]} is not: start with torchrun, or unset RANK")
    try:
        return Place(*(int(os.environ[name]) for name in _TORCHRUN[:4]))
    except ValueError as error:
        values = ", ".join(f"{name}={os.environ[name]}" for name in _TORCHRUN[:4])
        raise InputError(f"the environment has {values}: they are numbers, as torchrun sets them") from error


def number_of_processes(args: argparse.Namespace) -> int:
    """Of the whole run, by torchrun or by detectron2's arguments."""
    place = torchrun_place()
    return args.num_gpus * args.num_machines if place is None else place.world_size


def check_processes(args: argparse.Namespace, *, device: str, key: str = "MODEL.DEVICE") -> None:
    """Whether torchrun or detectron2's arguments ask for processes that can be.

    Args:
        device: of the config, by its ``key``.

    Raises:
        InputError: where not.
    """
    place, on_cpu = torchrun_place(), device.startswith("cpu")
    if place is not None:
        if args.num_gpus != 1 or args.num_machines != 1:
            raise InputError(
                f"torchrun has started {place.world_size} processes: leave out --num-gpus and --num-machines"
            )
        if place.world_size > 1 and os.environ.get("MASTER_PORT") == "0":
            # They would wait for each other there for ever.
            raise InputError("torchrun's --master-port is 0, which is none: name a free one, or add --standalone to it")
        here, what = place.local_world_size, f"torchrun has started {place.local_world_size} processes here"
    else:
        _check_arguments(args)
        here, what = args.num_gpus, f"--num-gpus is {args.num_gpus}"
    if number_of_processes(args) > 1 and ":" in device:
        kind = device.partition(":")[0]
        raise InputError(f"{key} is {device}: with several processes it is {kind}, each has its own")
    if on_cpu and place is None and here > max(os.cpu_count() or 1, 2):
        raise InputError(f"{what}, and there are {os.cpu_count()} CPU cores here")
    if not on_cpu and here > max(torch.cuda.device_count(), 1):
        raise InputError(f"{what}, and there are {torch.cuda.device_count()} GPUs here")


def _check_arguments(args: argparse.Namespace) -> None:
    if args.num_gpus < 1:
        raise InputError(
            f"--num-gpus is {args.num_gpus}: it is 1 or more, one process each; to train without a GPU leave it out, "
            "and add MODEL.DEVICE cpu"
        )
    if args.num_machines < 1:
        raise InputError(f"--num-machines is {args.num_machines}: it is 1 or more")
    if not 0 <= args.machine_rank < args.num_machines:
        last = args.num_machines - 1
        raise InputError(f"--machine-rank is {args.machine_rank}: of {args.num_machines} machines it is 0 to {last}")
    if args.num_machines > 1 and args.dist_url in ("auto", _default_url()):
        raise InputError(
            f"--num-machines is {args.num_machines}, and --dist-url names none of them: add --dist-url "
            "tcp://HOST:PORT with the first machine's name and a free port of it, on all machines"
        )


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """For mistakes that all processes of torchrun find alike: the first one of a machine says them.

    The others leave it some time to do so: torchrun ends them once one has failed.
    """
    try:
        yield
    except InputError:
        place = torchrun_place()
        if place is not None and place.local_rank:
            time.sleep(SECONDS_TO_END)
        raise


def start_processes(
    run: Callable, args: argparse.Namespace, *run_args: object, output_dir: str, device: str, key: str = "OUTPUT_DIR"
) -> None:
    """Make the folder of a run, and call ``run`` in its processes: this one, those that torchrun has started, this one
    among them, or as many as detectron2's arguments ask for, over NCCL on GPUs and over gloo on the CPU.

    Args:
        run: is called with ``run_args``.
        args: of detectron2's parser.
        output_dir: the folder, by a config's ``key``.
        device: of the config.

    Raises:
        InputError: where the folder cannot be made, and a mistake that ``run`` finds.
        RunEnded: where a process was killed.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {key} {output_dir}: {error.strerror}") from error
    place = torchrun_place()
    if number_of_processes(args) == 1:
        run(*run_args)
    elif place is not None:
        _run_under_torchrun(run, run_args, place, device)
    else:
        _Group(run, run_args, args, device).join()


def data_parallel(model: nn.Module, **options: Any) -> nn.Module:
    """``DistributedDataParallel`` around a model where there are several processes, on the CPU too.

    Args:
        options: of it.
    """
    if comm.get_world_size() == 1:
        return model
    on_gpu = next(model.parameters()).device.type == "cuda"
    return create_ddp_model(model, **({"device_ids": [comm.get_local_rank()] if on_gpu else None} | options))


def share_statistics(model: nn.Module) -> None:
    """Give all processes the running statistics of the first: each has gathered its own, and one is saved.

    So all evaluate the model that is in the checkpoint. All processes call this.
    """
    if comm.get_world_size() == 1:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            for buffer in module.buffers(recurse=False):
                torch.distributed.broadcast(buffer, src=0)


# -- inside a process of several -------------------------------------------------------------------


def _run_under_torchrun(run: Callable, run_args: Sequence[object], place: Place, device: str) -> None:
    try:
        with _joined(place, device, store=_store_of_torchrun()):
            run(*run_args)
    except RuntimeError as error:
        ended = explain_ending(error)
        if ended is not None and ended.follows:
            # torchrun ends this process when it has seen the one that is the cause; only without one is this said.
            time.sleep(SECONDS_TO_END)
        raise


def _store_of_torchrun() -> torch.distributed.Store:
    """torchrun keeps one for all its starts: what is left there of processes that have ended is not to be read."""
    store, _, _ = next(torch.distributed.rendezvous("env://", timeout=TIMEOUT))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch.distributed.PrefixStore(f"start_{start}", store)


@contextlib.contextmanager
def _joined(place: Place, device: str, **rendezvous: Any) -> Iterator[None]:
    """While this lasts, this process is one of its group's; detectron2 knows which."""
    on_gpu = not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    group = {"rank": place.rank, "world_size": place.world_size, "timeout": TIMEOUT}
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **group, **rendezvous)
    comm.create_local_process_group(place.local_world_size)
    comm.synchronize()
    yield
    # Not where the run failed: others may wait for it, and this would wait for them.
    torch.distributed.destroy_process_group()


def _work(
    run: Callable,
    run_args: Sequence[object],
    place: Place,
    device: str,
    url: str | int,
    signals: Sequence[int],
    reports: Connection,
    start_method: str,
) -> None:
    """What a process does that was started here.

    Args:
        url: where the processes meet, or the port of a store on this machine.
        signals: that this process heeds; they are blocked until now.
        reports: takes the reason of its end.
        start_method: of the processes that load data. This one's own would be theirs: new interpreters, seconds each.
    """
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    for number in signals:
        signal.signal(number, end_by_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        with _joined(place, device, **_rendezvous(url, place)):
            run(*run_args)
    except InputError as error:
        reports.send(("mistake", str(error)))
        sys.exit(1)
    except Exception as error:
        ended = explain_ending(error)
        if ended is None:
            reports.send(("error", traceback.format_exc()[-_LONGEST_REPORT:]))
        else:
            reports.send(("follows" if ended.follows else "ended", str(ended)))
        sys.exit(1)


def _rendezvous(url: str | int, place: Place) -> dict[str, Any]:
    if isinstance(url, str):
        return {"init_method": url}
    return {"store": torch.distributed.TCPStore("127.0.0.1", url, place.world_size, is_master=False, timeout=TIMEOUT)}


def _end_with_parent() -> None:
    """A process whose parent was killed saves and ends, as if told to."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)


def _default_url() -> str:
    return default_argument_parser().get_default("dist_url")


# -- in the process that starts them ---------------------------------------------------------------


class _Group:
    """The processes of a run on this machine, which end together.

    Args:
        run, run_args, args, device: as :func:`start_processes`.
    """

    def __init__(self, run: Callable, run_args: Sequence[object], args: argparse.Namespace, device: str) -> None:
        self.requested: int | None = None
        self.ended_here: set[int] = set()
        # The store is here, so that two runs on one machine cannot take the same port.
        self.store = None
        url: str | int = args.dist_url
        if args.num_machines == 1 and url in ("auto", _default_url()):
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            url = self.store.port
        # CUDA, and OpenMP's threads, do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.signals = heeded_signals()
        self.reports: list[Connection] = []
        self.processes: list[BaseProcess] = []
        first, size = args.machine_rank * args.num_gpus, args.num_gpus * args.num_machines
        # It unblocks signals where it starts.
        multiprocessing.resource_tracker.ensure_running()
        # A signal that comes while a process starts waits until it can be handled there.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        self._handling = contextlib.ExitStack()
        try:
            for local_rank in range(args.num_gpus):
                reader, writer = context.Pipe(duplex=False)
                place = Place(first + local_rank, local_rank, size, args.num_gpus)
                method = multiprocessing.get_start_method()
                arguments = (run, run_args, place, device, url, self.signals, writer, method)
                process = context.Process(target=_work, args=arguments)
                process.start()
                writer.close()
                self.reports.append(reader)
                self.processes.append(process)
            self._handling.enter_context(handling_signals(self._pass_on, self.signals))
        except BaseException:
            self._kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)

    def join(self) -> None:
        """Wait until all have ended.

        Raises:
            InputError, RunEnded, ProcessRaisedException: the reason of the one that failed.
            SystemExit: where a signal has ended them.
        """
        with self._handling:
            while (alive := self._alive()) and not self._failed():
                multiprocessing.connection.wait([process.sentinel for process in alive])
            self._end_others()
        self._raise_reason()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.requested == number == signal.SIGINT:
            self._kill()
        self.requested = self.requested or number
        for process in self._alive():
            # It may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _kill(self) -> None:
        for index, process in enumerate(self.processes):
            if process.exitcode is None:
                self.ended_here.add(index)
                process.kill()

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None]

    def _failed(self) -> list[int]:
        """The indices of those that did not end well."""
        return [index for index, process in enumerate(self.processes) if process.exitcode]

    def _end_others(self) -> None:
        """Once one has failed or was told to stop: the others end by themselves, or are told to, or are killed."""
        stopped = self._stop_signal()
        if stopped is None:
            self._wait(SECONDS_TO_FAIL)
        for index, process in enumerate(self.processes):
            if process.exitcode is None:
                if stopped is None:
                    self.ended_here.add(index)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, stopped or signal.SIGTERM)
        self._wait(SECONDS_TO_END if stopped is None else SECONDS_TO_SAVE)
        self._kill()
        self._wait(SECONDS_TO_END)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (alive := self._alive()) and (left := until - time.monotonic()) > 0:
            multiprocessing.connection.wait([process.sentinel for process in alive], left)

    def _stop_signal(self) -> int | None:
        """The one that the run was told to stop by, here or in a process."""
        if self.requested is not None:
            return self.requested
        codes = [process.exitcode for process in self.processes]
        return next((number for number in self.signals if 128 + number in codes), None)

    def _raise_reason(self) -> None:
        """Of those that ended by themselves, the one that says most."""
        failed = [index for index in self._failed() if index not in self.ended_here] or self._failed()
        codes = {index: self.processes[index].exitcode for index in failed}
        stopped = self._stop_signal()
        killed = [i for i, code in codes.items() if code < 0 and i not in self.ended_here and -code != stopped]
        said = {index: _report(self.reports[index]) for index in failed}
        texts = {kind: text for kind, text in reversed(list(said.values()))}
        if "mistake" in texts:
            raise InputError(texts["mistake"])
        if killed:
            raise process_ended(f"process {killed[0]} of {len(self.processes)}", codes[killed[0]])
        if "ended" in texts:
            raise RunEnded(texts["ended"])
        if "error" in texts:
            index = next(index for index, (kind, _) in said.items() if kind == "error")
            message = f"\n\n-- Process {index} terminated with the following error:\n{texts['error']}"
            raise ProcessRaisedException(message, index, self.processes[index].pid)
        if failed and stopped is not None:
            print(f"{signal.Signals(stopped).name}: the run was ended", file=sys.stderr)
            sys.exit(128 + stopped)
        if "follows" in texts:
            raise RunEnded(texts["follows"])
        if failed:
            raise process_ended(f"process {failed[0]} of {len(self.processes)}", codes[failed[0]])


def _report(reports: Connection) -> tuple[str, str]:
    """The kind of a process' end, and what it says of it; both empty where it had no time to."""
    try:
        return reports.recv()
    except EOFError:
        return "", ""
