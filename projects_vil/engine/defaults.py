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
from detectron2.engine import DefaultTrainer, HookBase, default_setup, launch
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.utils import comm
from torch import nn

from backbones import InputError
from backbones.attention.performer import PerformerAttention, redraw_features
from projects_vil.checkpoint.detection_checkpoint import Checkpointer, build_on_meta, check_weights
from projects_vil.config.defaults import load_config
from projects_vil.data import build as data
from projects_vil.evaluation import build as evaluation
from projects_vil.solver import build as optim

RESULTS_FILE = "evaluation.json"


class Trainer(DefaultTrainer):
    """Trains, evaluates and resumes as :class:`DefaultTrainer` does; the differences are in the methods below."""

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return optim.build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(
        cls, cfg: CfgNode, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        return optim.build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> torch.utils.data.DataLoader:
        return data.build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
        return data.build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        folder = Path(cfg.OUTPUT_DIR) / "inference"
        if len(cfg.DATASETS.TEST) > 1:
            folder /= dataset_name
        return evaluation.build_evaluator(cfg, dataset_name, str(folder))

    def build_hooks(self) -> list:
        # DefaultTrainer builds its own checkpointer just before the hooks that save with it.
        self.checkpointer = Checkpointer(
            self._trainer.model, self.cfg.OUTPUT_DIR, cfg=self.cfg, trainer=weakref.proxy(self)
        )
        hooks = super().build_hooks()
        period = self.cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD
        if any(isinstance(module, PerformerAttention) for module in self.model.modules()):
            hooks.insert(0, RedrawFeatures(period))
        return hooks

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST`` and write ``OUTPUT_DIR/evaluation.json``: dataset -> task -> metric."""
        results = super().test(cfg, model, evaluators)
        if comm.is_main_process():
            write_results(cfg, results)
        return results


class RedrawFeatures(HookBase):
    """Draw Performer's random features anew every ``period`` iterations (ViL appendix D).

    The iteration is the seed: all processes draw the same, and a resumed run draws as one that was never stopped.
    The features themselves are in the checkpoint.
    """

    def __init__(self, period: int) -> None:
        if period < 1:
            raise InputError(f"MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD is {period}: it is 1 or more iterations")
        self.period = period

    def before_train(self) -> None:
        """Start with the features of the first process: detectron2 does not share buffers."""
        if comm.get_world_size() > 1:
            for module in self.trainer.model.modules():
                if isinstance(module, PerformerAttention):
                    torch.distributed.broadcast(module.features, src=0)

    def before_step(self) -> None:
        if self.trainer.iter and self.trainer.iter % self.period == 0:
            redraw_features(self.trainer.model, seed=self.trainer.iter)


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
    if args.num_gpus > max(torch.cuda.device_count(), 1):
        raise InputError(f"--num-gpus is {args.num_gpus}, and there are {torch.cuda.device_count()} here")
    check_setup(cfg, processes=args.num_gpus * args.num_machines, eval_only=args.eval_only, resume=args.resume)
    try:
        Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into OUTPUT_DIR {cfg.OUTPUT_DIR}: {error.strerror}") from error
    launch(
        _run,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


def check_setup(cfg: CfgNode, *, processes: int = 1, eval_only: bool = False, resume: bool = False) -> None:
    """Whether the model, devices, datasets and weights that a run needs are there.

    Raises:
        InputError: for the first that is not.
    """
    model = build_on_meta(cfg)
    on_gpu = check_device(cfg)
    if cfg.SOLVER.AMP.ENABLED and not eval_only and not on_gpu:
        raise InputError("SOLVER.AMP.ENABLED is True, and AMP needs MODEL.DEVICE cuda: set it to False")
    if not eval_only and cfg.SOLVER.IMS_PER_BATCH % max(processes, 1):
        raise InputError(f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, no multiple of {processes} processes")
    if not cfg.DATASETS.TEST and eval_only or not cfg.DATASETS.TRAIN and not eval_only:
        raise InputError(f"DATASETS.{'TEST' if eval_only else 'TRAIN'} is empty: name a dataset")
    for name in (*cfg.DATASETS.TEST, *(() if eval_only else cfg.DATASETS.TRAIN)):
        data.check_files(name)
    last = Path(cfg.OUTPUT_DIR) / "last_checkpoint"
    if resume and last.is_file():
        check_weights(cfg, str(last.with_name(last.read_text().strip())), complete=True, model=model)
        return
    if eval_only and not cfg.MODEL.WEIGHTS:
        raise InputError("MODEL.WEIGHTS is empty: name the checkpoint to evaluate")
    if cfg.MODEL.WEIGHTS:
        check_weights(cfg, cfg.MODEL.WEIGHTS, complete=eval_only, model=model)


def check_device(cfg: CfgNode) -> bool:
    """Whether ``MODEL.DEVICE`` is a GPU.

    Raises:
        InputError: where it is not here, or is of another kind than cpu and cuda.
    """
    on_gpu = cfg.MODEL.DEVICE.startswith("cuda")
    if not on_gpu and cfg.MODEL.DEVICE != "cpu":
        raise InputError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}: it is cpu or cuda")
    if on_gpu and not torch.cuda.is_available():
        raise InputError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, and there is no CUDA device here: add MODEL.DEVICE cpu")
    return on_gpu


def _run(args: argparse.Namespace) -> OrderedDict:
    """Train or evaluate in one process; returns what detectron2's trainer or evaluation does."""
    cfg = load_config(args.config_file, args.opts)
    data.register_datasets(cfg)
    default_setup(cfg, args)
    if not args.eval_only:
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
