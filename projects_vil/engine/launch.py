"""Start the processes of a run, or join the processes of torchrun, and train or evaluate in them."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from torch.distributed import DistNetworkError, FileStore, PrefixStore, Store, TCPStore
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from backbones import ConfigError
from backbones.errors import GENERATOR, check_replaceable, counted, handling_signals, terminate
from backbones.files import write_text
from projects_vil import utils
from projects_vil.checkpoint import Checkpointer, remove_run
from projects_vil.config import CONFIG_FILE, set_precision, with_overrides
from projects_vil.data import register_datasets
from projects_vil.engine.auto_micro_batch import choose_micro_batches
from projects_vil.engine.checks import check_output_dir
from projects_vil.engine.trainer import Trainer
from projects_vil.solver import resolve_schedule

# Minimum number of seconds that processes wait for each other, for example while rank 0 evaluates or reads the data. It
# is PyTorch's default for NCCL. If the network fails, each machine ends after this time.
LEAST_TIMEOUT = 600
# Seconds in which the other processes save and exit after one process has ended.
GRACE_PERIOD = 60


class DistributedEnv(NamedTuple):
    """The position of a process in its run, as torchrun's environment variables describe it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


class ProcessEnded(Exception):
    """Raised if a process of a run was killed.

    Args:
        message: Error message of one line.
        exit_status: Exit status for the command.
    """

    def __init__(self, message: str, *, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclasses.dataclass
class Processes:
    """The processes of a run, with the arguments of detectron2's ``launch``. Keep the defaults under torchrun.

    Attributes:
        device: ``MODEL.DEVICE``.
        num_gpus: Number of processes on this machine: one per GPU, or any number if the device is the CPU.
        num_machines: Number of machines.
        machine_rank: Rank of this machine, from 0.
        dist_url: ``tcp://HOST:PORT`` of the first machine. Used only with several machines.
        dist_timeout: Seconds to wait for the other machines at the start. During the run, processes wait this long for
            each other, but at least ``LEAST_TIMEOUT`` seconds.
        env: Position of this process if torchrun has started it.
        world_size: Number of processes on all machines.
        is_first: Whether this process is, or starts, the process with rank 0.

    Raises:
        ConfigError: If the processes cannot run on this machine, or if a variable of torchrun is missing or is not a
            number.
    """

    device: str
    num_gpus: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    dist_url: str = "auto"
    dist_timeout: float = 600

    def __post_init__(self) -> None:
        self.env: DistributedEnv | None = None
        self.world_size, self.is_first = self.num_gpus * self.num_machines, self.machine_rank == 0
        here, on_cpu = self.num_gpus, self.device.startswith("cpu")
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            try:
                self.env = env = DistributedEnv(*(int(os.environ[name.upper()]) for name in DistributedEnv._fields))
                if env.world_size > 1:
                    _ = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            except (KeyError, ValueError) as error:
                raise ConfigError(f"torchrun's variables are invalid ({error}). Use torchrun or unset RANK.") from error
            if self.world_size != 1:
                started = f"torchrun has started {env.world_size} processes"
                raise ConfigError(f"{started}. Remove --num-gpus and --num-machines.")
            here, self.world_size, self.is_first = env.local_world_size, env.world_size, env.rank == 0
        if not 0 <= self.machine_rank < self.num_machines:
            raise ConfigError(f"--machine-rank is {self.machine_rank}. It must be from 0 to {self.num_machines - 1}.")
        if self.num_machines > 1 and not re.fullmatch(r"tcp://(?!127\.0\.0\.1:)[^/]+:\d{1,5}", self.dist_url):
            raise ConfigError(f"--dist-url is {self.dist_url}. Use tcp://HOST:PORT of the first machine.")
        if self.world_size > 1 and ":" in self.device:
            device, _, _ = self.device.partition(":")
            raise ConfigError(f"MODEL.DEVICE is {self.device}. With several processes, use {device}.")
        available = max(os.cpu_count() or 1, 2) if on_cpu else max(torch.cuda.device_count(), 1)
        if not 0 < here <= available and not (on_cpu and self.env is not None):
            unit = "CPU cores" if on_cpu else "GPUs"
            raise ConfigError(f"--num-gpus is {here}, but this machine has {available} {unit}. Use 1 to {available}.")


def _set_up_run(cfg: CfgNode, *, eval_only: bool) -> None:
    """Log the environment, and set seeds, cuDNN and precision as detectron2's ``default_setup``."""
    logger = logging.getLogger("detectron2")
    logger.info("Rank of current process: %d. World size: %d", comm.get_rank(), comm.get_world_size())
    logger.info("Environment info:\n%s", collect_env_info())
    logger.info("Command line arguments: %s", sys.argv[1:])
    logger.info("Running with full config:\n%s", cfg.dump())
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + comm.get_rank())
    # In an evaluation, the images have too many different sizes for the cuDNN benchmark.
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    set_precision(cfg)


def save_config(cfg: CfgNode, trainer: type[Trainer]) -> None:
    """Write ``config.yaml`` in rank 0."""
    if comm.is_main_process():
        write_text(Path(cfg.OUTPUT_DIR) / CONFIG_FILE, f"# {GENERATOR}\n{trainer.dump_config(cfg)}")


def run_training(cfg: CfgNode, trainer_class: type[Trainer], resume: bool, overridden: Collection[str] = ()) -> None:
    """Train in one process. ``OUTPUT_DIR`` is locked against other runs by rank 0, and the other processes wait for it.

    Args:
        cfg: Config of the run.
        trainer_class: Trainer of the run. It is built from the config with the final schedule and seed.
        resume: Continue from the last checkpoint.
        overridden: Config keys that the user set for this run.

    Raises:
        ConfigError: If another run uses ``OUTPUT_DIR``, or if one finished there after this run started.
    """
    register_datasets(cfg)
    is_main, logger = comm.is_main_process(), logging.getLogger(__name__)
    with utils.run_lock(cfg.OUTPUT_DIR) if is_main else contextlib.nullcontext():
        comm.synchronize()
        is_new = not check_output_dir(cfg, resume=resume)
        utils.log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
        # The datasets are read before any file of an older run is deleted.
        num_images = trainer_class.read_datasets(cfg)
        cfg, lines = resolve_schedule(cfg, num_images, overridden)
        for line in lines:
            logger.info(line)
        if cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS == "auto":
            cfg = choose_micro_batches(cfg, resume=resume)
        comm.synchronize()
        # This key applies to this start only. A later start with this config.yaml must not delete the run.
        values: dict[str, object] = {"OVERWRITE_OUTPUT_DIR": False}
        if is_new and cfg.SEED < 0:
            # The seed determines the initial weights and is written to config.yaml.
            values["SEED"] = comm.shared_random_seed()
        if is_new and cfg.OVERWRITE_OUTPUT_DIR and is_main:
            remove_run(cfg.OUTPUT_DIR)
        cfg = with_overrides(cfg, values)
        _set_up_run(cfg, eval_only=False)
        solver = cfg.SOLVER
        if solver.WARMUP_ITERS >= solver.MAX_ITER:
            logger.warning("The learning rate never reaches BASE_LR: SOLVER.WARMUP_ITERS is not below MAX_ITER.")
        logger.info(
            f"training {cfg.MODEL.META_ARCHITECTURE} with {cfg.MODEL.TRANSFORMER.VARIANT} on {cfg.MODEL.DEVICE} in "
            f"{counted(comm.get_world_size(), 'process')}: {solver.MAX_ITER} iterations. The config, the model and the "
            f"environment are in {cfg.OUTPUT_DIR}/log.txt"
        )
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=resume)
        # The checkpoint of a resumed run is loaded first. If that fails, config.yaml is unchanged.
        save_config(trainer.cfg, trainer_class)
        trainer.train()
        trainer.evaluate_best()


def run_evaluation(cfg: CfgNode, trainer: type[Trainer], resume: bool) -> None:
    """Evaluate a model in one process.

    Args:
        cfg: Config of the run.
        trainer: Builds and evaluates the model.
        resume: Evaluate the last checkpoint in ``OUTPUT_DIR`` instead of ``MODEL.WEIGHTS``.
    """
    register_datasets(cfg)
    utils.log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    trainer.read_datasets(cfg, train=False)
    _set_up_run(cfg, eval_only=True)
    folder = Path(cfg.OUTPUT_DIR)
    # A training run keeps its config.
    if not any(any(folder.glob(pattern)) for pattern in ("*.pth", "metrics.json", utils.LOCK_FILE)):
        check_replaceable(folder / CONFIG_FILE, advice="Choose another OUTPUT_DIR.")
        save_config(cfg, trainer)
    model = trainer.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg, complete=True)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    is_single = comm.get_world_size() == 1
    with utils.stop_requests(single_process=is_single) as received, utils.terminating_between_calls(model, received):
        results = trainer.test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)


# -- processes -------------------------------------------------------------------------------------


def launch(run: Callable[[], object], processes: Processes) -> None:
    """Call ``run()`` in all processes of a run, with NCCL on GPUs or gloo on the CPU.

    A run with one process uses the current process. If one process ends, the others end too. SIGINT, SIGTERM and
    SIGHUP are forwarded to all processes.

    Args:
        run: A function that can be imported, or a ``functools.partial`` of one with picklable arguments.
        processes: The processes to start.

    Raises:
        ConfigError: If ``run`` raises it in a process.
        ProcessEnded: If a process was killed.
        ProcessRaisedException: If ``run`` raises any other exception in a new process. It has the traceback.
        SystemExit: If a signal stopped the run, with 128 plus the number of the signal.
    """
    if processes.world_size == 1:
        run()
    elif processes.env is not None:
        url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with _process_group(processes, processes.env, url):
            run()
    else:
        with tempfile.TemporaryDirectory() as folder:
            url = processes.dist_url if processes.num_machines > 1 else f"file://{folder}/store"
            _spawn(run, processes, url)


def _spawn(run: Callable[[], object], processes: Processes, url: str) -> None:
    workers: list[BaseProcess] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and number in received
        received.append(number)
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGKILL if is_second else number)

    with handling_signals(pass_on):
        worker_args, count = (run, processes, url), processes.num_gpus
        # CUDA and OpenMP's threads do not survive a fork.
        with utils.hidden_main_module():
            context = start_processes(_worker, worker_args, nprocs=count, join=False, start_method="spawn")
        workers += context.processes
        for number in received[:1]:
            pass_on(number, None)
        try:
            while not context.join(grace_period=GRACE_PERIOD):
                pass
        except ProcessRaisedException as error:
            # torch passes the exception as text.
            _, is_ours, message = str(error).rpartition(f"{ConfigError.__module__}.{ConfigError.__qualname__}: ")
            if is_ours:
                raise ConfigError(message.strip()) from error
            raise
        except ProcessExitedException as error:
            if received or error.exit_code > 128:
                raise SystemExit(128 + received[0] if received else error.exit_code) from None
            reason = error.signal_name or f"exit status {error.exit_code}"
            is_memory = reason in ("SIGKILL", "SIGBUS")
            hint = " The memory may be too small. Use fewer processes or a smaller batch." if is_memory else ""
            raise ProcessEnded(
                f"Process {error.error_index} of {count} was ended by {reason}.{hint}",
                exit_status=abs(error.exit_code) + (128 if error.signal_name else 0),
            ) from None
        if received:
            # A terminal sends SIGINT to all processes. After a second SIGINT, torch reports the exit status 0.
            raise SystemExit(128 + received[0])


def _worker(local_rank: int, run: Callable[[], object], processes: Processes, url: str) -> None:
    # This resets the start method to the default. Otherwise data loader workers would be spawned, which takes seconds.
    multiprocessing.set_start_method(None, force=True)
    rank, count = processes.machine_rank * processes.num_gpus + local_rank, processes.num_gpus
    env = DistributedEnv(rank, local_rank, processes.world_size, count)
    status = None
    with handling_signals(terminate):
        try:
            with _process_group(processes, env, url):
                run()
        except SystemExit as error:
            status = error.code
    if status is not None:
        # A terminal sends Ctrl-C to all processes, and the parent process forwards it again.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Outside of the except block: the traceback has references to data loaders, which must be deleted first.
    sys.exit(status)


@contextlib.contextmanager
def _process_group(processes: Processes, env: DistributedEnv, url: str) -> Iterator[None]:
    on_gpu, timeout = not processes.device.startswith("cpu"), processes.dist_timeout
    if on_gpu:
        torch.cuda.set_device(env.local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // env.local_world_size))
    # Ray Train creates the group itself.
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        store, wait = _rendezvous(env, url, timeout), timedelta(seconds=max(timeout, LEAST_TIMEOUT))
        store.set_timeout(wait)
        options = {"store": store, "rank": env.rank, "world_size": env.world_size, "timeout": wait}
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **options)
    comm.create_local_process_group(env.local_world_size)
    comm.synchronize()
    yield
    # Not in a finally clause: after an exception, the other processes may never reach this line.
    if is_ours:
        torch.distributed.destroy_process_group()


def _rendezvous(env: DistributedEnv, url: str, timeout: float) -> Store:
    """Wait for all processes of a run and return a store that they share.

    After a restart, torchrun's store still has the addresses of the old processes, and each machine counts restarts
    separately. Therefore the first process writes a new key at each start, and all processes register with this key.

    Args:
        env: Position of this process.
        url: ``tcp://HOST:PORT`` of the first machine, or ``file://PATH``.
        timeout: Seconds to wait.

    Raises:
        ConfigError: If the host has no address, if the port is in use, or after the timeout.
    """
    machines = env.world_size // env.local_world_size
    begin, store, key, is_ours = time.monotonic(), None, "", False
    if env.local_rank == 0 and machines > 1:
        print(f"waiting for {machines} machines at {url}, at most {timeout:g} s", file=sys.stderr, flush=True)
    while True:
        store = store or _open_store(env, url, timeout)
        if store is not None:
            if env.rank == 0 and not key:
                store.set("start", f"{env.world_size} {os.urandom(8).hex()}")
            if store.check(["start"]) and (given := store.get("start").decode()) != key:
                key = given
                # If an older process with this rank has already registered, the first process writes another key.
                is_ours = key.startswith(f"{env.world_size} ") and store.add(f"{key} {env.rank}", 1) == 1
            if env.rank == 0 and store.check([f"{key} {rank}" for rank in range(env.world_size)]):
                store.set(f"{key} all", "")
            if is_ours and store.check([f"{key} all"]):
                return PrefixStore(key, store)
        if time.monotonic() - begin > timeout:
            advice = "Start all machines within --dist-timeout, and check the firewall."
            raise ConfigError(f"Not all processes connected to {url} within {timeout:g} s. {advice}")
        time.sleep(0.1)


def _open_store(env: DistributedEnv, url: str, timeout: float) -> Store | None:
    """Return the store at a URL, or ``None`` if the first process does not answer yet."""
    address = urlsplit(url)
    if address.scheme == "file":
        return FileStore(address.path, env.world_size)
    # Under torchrun, the process of torchrun serves the store.
    is_server = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # TCPStore waits in C++, where Ctrl-C has no effect.
        if not is_server:
            socket.create_connection((address.hostname, address.port), timeout=5).close()
        options = {"is_master": is_server, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        return TCPStore("localhost" if is_server else address.hostname, address.port, **options)
    except (socket.gaierror, DistNetworkError) as error:
        raise ConfigError(f"Cannot connect to {url}: {str(error).splitlines()[0]}. Check --dist-url.") from error
    except OSError:
        return None
