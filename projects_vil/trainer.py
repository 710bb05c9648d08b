"""detectron2's default trainer with this project's optimizer, datasets, checkpoints and results file."""

import argparse
import json
import logging
import math
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, default_setup, launch
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.utils import comm
from torch import nn

from backbones import InputError
from projects_vil import data, evaluation, optim
from projects_vil.checkpoint import Checkpointer, check_weights_file
from projects_vil.config import load_config

RESULTS_FILE = "evaluation.json"


class Trainer(DefaultTrainer):
    """Trains, evaluates and resumes as :class:`DefaultTrainer` does; the differences are in the methods below."""

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return optim.build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> torch.utils.data.DataLoader:
        return data.build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
        return data.build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return evaluation.build_evaluator(cfg, dataset_name, str(Path(cfg.OUTPUT_DIR) / "inference"))

    def build_hooks(self) -> list:
        # DefaultTrainer builds its own checkpointer just before the hooks that save with it.
        self.checkpointer = Checkpointer(
            self._trainer.model, self.cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        return super().build_hooks()

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST`` and write ``OUTPUT_DIR/evaluation.json``: dataset -> task -> metric."""
        results = super().test(cfg, model, evaluators)
        if comm.is_main_process():
            write_results(cfg, results)
        return results


def write_results(cfg: CfgNode, results: OrderedDict) -> None:
    """Write ``OUTPUT_DIR/evaluation.json``; a metric that is not defined is null."""
    names = cfg.DATASETS.TEST
    by_dataset = {names[0]: results} if len(names) == 1 else results
    finite = {
        name: {
            task: {metric: value if math.isfinite(value) else None for metric, value in metrics.items()}
            for task, metrics in tasks.items()
        }
        for name, tasks in by_dataset.items()
    }
    path = Path(cfg.OUTPUT_DIR) / RESULTS_FILE
    path.write_text(json.dumps(finite, indent=2) + "\n")
    logging.getLogger(__name__).info("results written to %s", path)


def train_from_command_line(args: argparse.Namespace) -> None:
    """What ``tools/train_net.py`` does: check what can be checked in a second, then start the processes.

    Args:
        args: of ``detectron2.engine.default_argument_parser``.

    Raises:
        InputError: for a mistake in the config, its overrides or the files that they name.
    """
    cfg = load_config(args.config_file, args.opts)
    data.register_datasets(cfg)
    check_setup(cfg, num_gpus=args.num_gpus, eval_only=args.eval_only)
    launch(
        _run,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


def check_setup(cfg: CfgNode, *, num_gpus: int, eval_only: bool) -> None:
    """Whether devices, datasets and weights that a run needs are there.

    Raises:
        InputError: for the first that is not.
    """
    available = torch.cuda.device_count()
    if cfg.MODEL.DEVICE.startswith("cuda") and not available:
        raise InputError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, and there is no CUDA device here: add MODEL.DEVICE cpu")
    if num_gpus > max(available, 1):
        raise InputError(f"--num-gpus is {num_gpus}, and there are {available} here")
    if cfg.SOLVER.AMP.ENABLED and not eval_only and not cfg.MODEL.DEVICE.startswith("cuda"):
        raise InputError("SOLVER.AMP.ENABLED is True, and AMP needs MODEL.DEVICE cuda: set it to False")
    for name in (*cfg.DATASETS.TEST, *(() if eval_only else cfg.DATASETS.TRAIN)):
        data.check_files(name)
    if eval_only and not cfg.MODEL.WEIGHTS:
        raise InputError("MODEL.WEIGHTS is empty: name the checkpoint to evaluate")
    if cfg.MODEL.WEIGHTS:
        check_weights_file(cfg.MODEL.WEIGHTS)


def _run(args: argparse.Namespace) -> OrderedDict:
    """Train or evaluate in one process; the results of the last evaluation, task -> metric -> value."""
    cfg = load_config(args.config_file, args.opts)
    data.register_datasets(cfg)
    default_setup(cfg, args)
    if not args.eval_only:
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        return trainer.train()
    model = Trainer.build_model(cfg)
    Checkpointer(model).load(cfg.MODEL.WEIGHTS)
    results = Trainer.test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)
    return results
