"""detectron2's default trainer with this project's optimizer, datasets, checkpoints and results file."""

import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from torch import nn

from backbones.attention.performer import PerformerAttention
from projects_vil import data, evaluation, solver
from projects_vil.checkpoint import Checkpointer
from projects_vil.engine.hooks import RedrawFeatures
from projects_vil.evaluation import write_results


class Trainer(DefaultTrainer):
    """Trains, evaluates and resumes as :class:`DefaultTrainer` does; the differences are in the methods below."""

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return solver.build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(
        cls, cfg: CfgNode, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        return solver.build_lr_scheduler(cfg, optimizer)

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
