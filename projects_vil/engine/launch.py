"""Training and evaluation from the command line."""

import argparse
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.engine import default_argument_parser, default_setup, launch
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from backbones import InputError
from projects_vil.checkpoint import Checkpointer, checkpoints_of, remove_run
from projects_vil.config import ConfigToolParser, load_config
from projects_vil.data import read_ahead, register_datasets
from projects_vil.engine.checks import check_setup
from projects_vil.engine.defaults import Trainer
from projects_vil.solver import count_training_images, is_by_epochs, scale_learning_rate, schedule_by_epochs
from projects_vil.utils import log_run


def training_parser(description: str | None) -> ConfigToolParser:
    """detectron2's arguments for training, with this project's way to override."""
    return ConfigToolParser(description, config_file=False, parents=[default_argument_parser()])


def train_from_command_line(args: argparse.Namespace) -> None:
    """What ``tools/train_net.py`` does: check what can be checked in a second, then start the processes.

    Args:
        args: of :func:`training_parser`.

    Raises:
        InputError: for a mistake in the config, its overrides or the files that they name.
    """
    cfg = load_config(args.config_file, args.opts)
    register_datasets(cfg)
    check_processes(args)
    check_setup(cfg, processes=args.num_gpus * args.num_machines, eval_only=args.eval_only, resume=args.resume)
    num_images = 0
    if not args.eval_only and is_by_epochs(cfg, args.opts):
        num_images = count_training_images(cfg)
    start_processes(_run, args, args, num_images, output_dir=cfg.OUTPUT_DIR)


def start_processes(
    run: Callable, args: argparse.Namespace, *run_args: object, output_dir: str, key: str = "OUTPUT_DIR"
) -> None:
    """Make the folder of a run, and call ``run`` in the processes that detectron2's arguments ask for.

    Args:
        run: is called with ``run_args``.
        args: of detectron2's parser.
        output_dir: the folder, by a config's ``key``.

    Raises:
        InputError: where the folder cannot be made.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {key} {output_dir}: {error.strerror}") from error
    launch(
        run,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=run_args,
    )


def check_processes(args: argparse.Namespace) -> None:
    """Whether detectron2's arguments ask for processes that can be.

    Raises:
        InputError: where not.
    """
    if args.num_gpus < 1:
        raise InputError(
            f"--num-gpus is {args.num_gpus}: it is 1 or more, one process each; to train without a GPU leave it out, "
            "and add MODEL.DEVICE cpu"
        )
    if args.num_gpus > max(torch.cuda.device_count(), 1):
        raise InputError(f"--num-gpus is {args.num_gpus}, and there are {torch.cuda.device_count()} here")
    if args.num_machines < 1:
        raise InputError(f"--num-machines is {args.num_machines}: it is 1 or more")
    if not 0 <= args.machine_rank < args.num_machines:
        last = args.num_machines - 1
        raise InputError(f"--machine-rank is {args.machine_rank}: of {args.num_machines} machines it is 0 to {last}")


def _run(args: argparse.Namespace, num_images: int) -> OrderedDict:
    """Train or evaluate in one process; returns what detectron2's trainer or evaluation does.

    Args:
        num_images: to train on, for ``SOLVER.EPOCHS``.
    """
    cfg = load_config(args.config_file, args.opts)
    register_datasets(cfg)
    lines = []
    if not args.eval_only:
        cfg, lines = schedule_by_epochs(cfg, num_images, args.opts)
        cfg, scaling = scale_learning_rate(cfg, processes=comm.get_world_size())
        lines += scaling
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    if not args.eval_only:
        # Before anything of an older run is removed.
        read_ahead(cfg)
    is_new = not args.eval_only and not (args.resume and checkpoints_of(cfg.OUTPUT_DIR))
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
    if not args.eval_only:
        logging.getLogger(__name__).info(
            "training %s with %s on %s: %d iterations; %s/log.txt has the config, the model and the environment too",
            cfg.MODEL.META_ARCHITECTURE,
            cfg.MODEL.TRANSFORMER.NAME,
            cfg.MODEL.DEVICE,
            cfg.SOLVER.MAX_ITER,
            cfg.OUTPUT_DIR,
        )
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        return trainer.train()
    model = Trainer.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg, complete=True)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
    results = Trainer.test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)
    return results
