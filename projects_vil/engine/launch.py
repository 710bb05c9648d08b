"""Training and evaluation from the command line."""

import argparse
import contextlib
import logging
from collections import OrderedDict
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from backbones.utils.files import written_whole
from projects_vil.checkpoint import Checkpointer, checkpoints_of, remove_run
from projects_vil.config import CONFIG_FILE, ConfigToolParser, check_typed_keys, load_config
from projects_vil.data import read_ahead, register_datasets
from projects_vil.engine.checks import check_setup
from projects_vil.engine.defaults import Trainer
from projects_vil.engine.processes import (
    check_processes,
    explain_processes,
    number_of_processes,
    said_once,
    start_processes,
)
from projects_vil.solver import count_training_images, is_by_epochs, scale_learning_rate, schedule_by_epochs
from projects_vil.utils import check_unlocked, log_run, run_lock, told_between_calls


def training_parser(description: str | None) -> ConfigToolParser:
    """detectron2's arguments for training, with this project's way to override."""
    parser = ConfigToolParser(description, config_file=False, parents=[default_argument_parser()])
    explain_processes(parser, device="MODEL.DEVICE cpu")
    return parser


def train_from_command_line(args: argparse.Namespace) -> None:
    """What ``tools/train_net.py`` does: check what can be checked in a second, then start the processes.

    Args:
        args: of :func:`training_parser`.

    Raises:
        InputError: for a mistake in the config, its overrides or the files that they name.
    """
    with said_once():
        cfg = load_config(args.config_file, args.opts)
        register_datasets(cfg)
        check_processes(args, device=cfg.MODEL.DEVICE)
        if not args.eval_only:
            check_unlocked(cfg.OUTPUT_DIR)
        processes = number_of_processes(args)
        check_setup(cfg, processes=processes, eval_only=args.eval_only, resume=args.resume)
        if not args.eval_only:
            check_typed_keys(cfg, args.opts)
        num_images = 0
        if not args.eval_only and is_by_epochs(cfg, args.opts):
            num_images = count_training_images(cfg)
    start_processes(_run, args, args, num_images, output_dir=cfg.OUTPUT_DIR, device=cfg.MODEL.DEVICE)


def _run(args: argparse.Namespace, num_images: int) -> OrderedDict:
    """Train or evaluate in one process; returns what detectron2's trainer or evaluation does.

    Args:
        num_images: to train on, for ``SOLVER.EPOCHS``.
    """
    cfg = load_config(args.config_file, args.opts)
    register_datasets(cfg)
    if args.eval_only:
        return _evaluate(cfg, args)
    with run_lock(cfg.OUTPUT_DIR) if comm.is_main_process() else contextlib.nullcontext():
        # Nothing is written before the lock is there.
        comm.synchronize()
        return _train(cfg, args, num_images)


def _train(cfg: CfgNode, args: argparse.Namespace, num_images: int) -> OrderedDict:
    cfg, lines = schedule_by_epochs(cfg, num_images, args.opts)
    cfg, scaling = scale_learning_rate(cfg, processes=comm.get_world_size())
    lines += scaling
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    # Before anything of an older run is removed.
    read_ahead(cfg)
    is_new = not (args.resume and checkpoints_of(cfg.OUTPUT_DIR))
    comm.synchronize()
    if is_new:
        cfg.defrost()
        if cfg.SEED < 0:
            # Drawn here, so that it is in config.yaml and the first weights follow from it too.
            cfg.SEED = comm.shared_random_seed()
        if cfg.OVERWRITE_OUTPUT_DIR and comm.is_main_process():
            remove_run(cfg.OUTPUT_DIR)
        # Of this start alone, and not of those that its config.yaml is given to.
        cfg.OVERWRITE_OUTPUT_DIR = False
        cfg.freeze()
    default_setup(cfg, args)
    for line in lines:
        logging.getLogger("detectron2").info(line)
    if cfg.SOLVER.WARMUP_ITERS >= cfg.SOLVER.MAX_ITER:
        logging.getLogger(__name__).warning(
            "SOLVER.WARMUP_ITERS is %d, and SOLVER.MAX_ITER %d: the learning rate never comes to SOLVER.BASE_LR %g",
            cfg.SOLVER.WARMUP_ITERS,
            cfg.SOLVER.MAX_ITER,
            cfg.SOLVER.BASE_LR,
        )
    logging.getLogger(__name__).info(
        "training %s with %s on %s: %d iterations; %s/log.txt has the config, the model and the environment too",
        cfg.MODEL.META_ARCHITECTURE,
        cfg.MODEL.TRANSFORMER.NAME,
        cfg.MODEL.DEVICE if comm.get_world_size() == 1 else f"{comm.get_world_size()} processes, {cfg.MODEL.DEVICE}",
        cfg.SOLVER.MAX_ITER,
        cfg.OUTPUT_DIR,
    )
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


def _evaluate(cfg: CfgNode, args: argparse.Namespace) -> OrderedDict:
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    comm.synchronize()
    _set_up_evaluation(cfg, args)
    model = Trainer.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg, complete=True)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
    with told_between_calls(model, alone=comm.get_world_size() == 1):
        results = Trainer.test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)
    return results


def _set_up_evaluation(cfg: CfgNode, args: argparse.Namespace) -> None:
    """detectron2's, which writes ``config.yaml``: that of a run, beside its weights or figures, stays as it is."""
    path = Path(cfg.OUTPUT_DIR) / CONFIG_FILE
    has_trained = any(any(path.parent.glob(pattern)) for pattern in ("*.pth", "metrics.json"))
    of_the_run = path.read_bytes() if has_trained and path.is_file() and comm.is_main_process() else None
    default_setup(cfg, args)
    if of_the_run is not None:
        with written_whole(path) as partial:
            partial.write_bytes(of_the_run)
