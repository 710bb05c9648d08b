"""Training and evaluation from the command line: what tools/train_net.py does."""

import argparse
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from torch import nn

from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable
from projects_vil.checkpoint import Checkpointer, checkpoints_of, remove_run
from projects_vil.config import CONFIG_FILE, check_override_effects, choose_device, load_config, with_overrides
from projects_vil.data import read_datasets, register_datasets
from projects_vil.engine.auto_micro_batch import choose_micro_batches
from projects_vil.engine.checks import check_output_dir, check_setup
from projects_vil.engine.launch import check_processes, launch, number_of_processes
from projects_vil.engine.trainer import Trainer
from projects_vil.solver import scale_learning_rate, schedule_by_epochs
from projects_vil.utils import log_run, run_lock, stop_requests, terminating_between_calls


def train_from_command_line(args: argparse.Namespace) -> None:
    """Check a run of a YAML config as far as that takes a second, then start its processes.

    Args:
        args: parsed by detectron2's ``default_argument_parser``, with all overrides in ``opts``.

    Raises:
        ConfigError: for a mistake in the config, its overrides or the files that they name.
    """
    cfg = load_config(args.config_file, args.opts)
    cfg = choose_device(cfg, requested="MODEL.DEVICE" in args.opts[::2])
    # For the processes, which read the config again.
    chosen = {"MODEL.DEVICE": cfg.MODEL.DEVICE}
    chosen["MODEL.TRANSFORMER.ATTENTION_BACKEND"] = cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND
    args.opts = [*args.opts, *itertools.chain.from_iterable(chosen.items())]
    register_datasets(cfg)
    check_processes(args, device=cfg.MODEL.DEVICE)
    if not args.eval_only:
        check_override_effects(cfg, args.opts)
    check_setup(cfg, processes=number_of_processes(args), eval_only=args.eval_only, resume=args.resume)
    launch(_run, args, output_dir=cfg.OUTPUT_DIR, device=cfg.MODEL.DEVICE)


def _run(args: argparse.Namespace) -> None:
    """Train or evaluate in one process."""
    cfg = load_config(args.config_file, args.opts)
    register_datasets(cfg)
    if args.eval_only:
        log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
        read_datasets(cfg, train=False)
        evaluate(cfg, args, Trainer.build_model, Trainer.test, _write_yaml)
        return
    with lock_output_dir(cfg, resume=args.resume):
        log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
        # Before anything of an older run is removed.
        num_images = read_datasets(cfg)
        cfg, lines = schedule_by_epochs(cfg, num_images, args.opts)
        cfg, scaling = scale_learning_rate(cfg)
        cfg, micro_batches = choose_micro_batches(cfg, resume=args.resume)
        for line in (*lines, *scaling, *micro_batches):
            logging.getLogger(__name__).info(line)
        train(cfg, args, Trainer, _write_yaml)


def _write_yaml(cfg: CfgNode, path: Path) -> None:
    path.write_text(cfg.dump())


@contextlib.contextmanager
def lock_output_dir(cfg: CfgNode, *, resume: bool) -> Iterator[None]:
    """Lock ``OUTPUT_DIR`` against other runs, in rank 0, before any process writes into it.

    Raises:
        ConfigError: if another run uses the directory, or has finished in it since the start of this run.
    """
    with run_lock(cfg.OUTPUT_DIR) if comm.is_main_process() else contextlib.nullcontext():
        comm.synchronize()
        check_output_dir(cfg, resume=resume)
        yield


def set_up_run(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Do what detectron2's ``default_setup`` does, except for writing ``config.yaml``."""
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    logger = logging.getLogger("detectron2")
    logger.info("Rank of current process: %d. World size: %d", comm.get_rank(), comm.get_world_size())
    logger.info("Environment info:\n%s", collect_env_info())
    logger.info("Command line arguments: %s", args)
    logger.info("Running with full config:\n%s", cfg.dump())
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + comm.get_rank())
    # Images of an evaluation differ too much in size.
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not args.eval_only


def save_config(cfg: CfgNode, write: Callable[[CfgNode, Path], object], *, eval_only: bool = False) -> None:
    """Write ``config.yaml`` in rank 0. An evaluation does not change the file of a training run.

    Raises:
        ConfigError: if the file exists and no run wrote it.
    """
    path = Path(cfg.OUTPUT_DIR) / CONFIG_FILE
    has_run = any(any(path.parent.glob(pattern)) for pattern in ("*.pth", "metrics.json", ".run.lock"))
    if comm.is_main_process() and not (eval_only and has_run):
        if eval_only:
            check_replaceable(path, advice="Choose another OUTPUT_DIR.")
        with atomic_write(path) as partial:
            write(cfg, partial)
            partial.write_text(f"# {GENERATOR}\n{partial.read_text()}")


def train(
    cfg: CfgNode,
    args: argparse.Namespace,
    make_trainer: Callable[[CfgNode], Trainer],
    write_config: Callable[[CfgNode, Path], object],
) -> OrderedDict | None:
    """Train in one process, in the :func:`lock_output_dir`.

    Args:
        cfg: the config of the run.
        args: the parsed command line.
        make_trainer: builds the trainer from the config with its final seed.
        write_config: writes ``config.yaml`` for that config.
    """
    is_new = not (args.resume and checkpoints_of(cfg.OUTPUT_DIR))
    comm.synchronize()
    # It applies only to this start, not to others with its config.yaml.
    values: dict[str, object] = {"OVERWRITE_OUTPUT_DIR": False}
    if is_new and cfg.SEED < 0:
        # In config.yaml, and the initial weights depend on it too.
        values["SEED"] = comm.shared_random_seed()
    if is_new and cfg.OVERWRITE_OUTPUT_DIR and comm.is_main_process():
        remove_run(cfg.OUTPUT_DIR)
    cfg = with_overrides(cfg, values)
    set_up_run(cfg, args)
    logger, solver = logging.getLogger(__name__), cfg.SOLVER
    if args.resume and is_new:
        start = "MODEL.WEIGHTS" if cfg.MODEL.WEIGHTS else "random weights, as MODEL.WEIGHTS is empty"
        logger.warning("%s has no checkpoint to --resume from: training starts with %s", cfg.OUTPUT_DIR, start)
    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        logger.warning("the learning rate never reaches SOLVER.BASE_LR: SOLVER.WARMUP_ITERS is SOLVER.MAX_ITER or more")
    logger.info(
        f"training {cfg.MODEL.META_ARCHITECTURE} with {cfg.MODEL.TRANSFORMER.VARIANT} on {cfg.MODEL.DEVICE} in "
        f"{comm.get_world_size()} process{'es' if comm.get_world_size() > 1 else ''}: {solver.MAX_ITER} iterations; "
        f"config, model and environment are in {cfg.OUTPUT_DIR}/log.txt"
    )
    trainer = make_trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    # Once the checkpoint of a resumed run is known to fit.
    save_config(trainer.cfg, write_config)
    return trainer.train()


def evaluate(
    cfg: CfgNode,
    args: argparse.Namespace,
    build_model: Callable[[CfgNode], nn.Module],
    test: Callable[[CfgNode, nn.Module], OrderedDict],
    write_config: Callable[[CfgNode, Path], object],
) -> None:
    """Evaluate ``MODEL.WEIGHTS``, or the last checkpoint with ``--resume``, in one process."""
    set_up_run(cfg, args)
    save_config(cfg, write_config, eval_only=True)
    model = build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg, complete=True)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
    is_single = comm.get_world_size() == 1
    with stop_requests(single_process=is_single) as received, terminating_between_calls(model, received):
        results = test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)
