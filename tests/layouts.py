"""Contents of checkpoints in the layout of each official repository."""

import argparse
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from yacs.config import CfgNode

Contents = dict[str, object]


def vision_longformer(weights: dict) -> Contents:
    """Return the layout of vision-longformer and transformer-ls: DistributedDataParallel and training state."""
    return {
        "net": {f"module.{name}": tensor for name, tensor in weights.items()},
        "arch": "l1,h1,d48,n1,s1,g1,p4,f7,a0",
        "epoch": 300,
        "best_acc": torch.tensor(76.7),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
    }


def lit_classifier(weights: dict) -> Contents:
    """Return the layout of LIT, with the settings of the run: a yacs config (LIT-S, -M, -B) or arguments (LIT-Ti)."""
    config = CfgNode({"MODEL": {"NAME": "lit", "DEPTHS": (2, 2, 6, 2)}, "EPOCHS": 300})
    config.freeze()
    arguments = argparse.Namespace(model="lit_ti", output_dir="out", input_size=224)
    return {"model": dict(weights), "max_accuracy": 81.5, "epoch": 299, "config": config, "args": arguments}


def detectron2_detector(weights: dict, heads: dict | None = None) -> Contents:
    """Return the layout of VisionLongformerForObjectDetection."""
    backbone = {f"backbone.bottom_up.{name}": tensor for name, tensor in weights.items()}
    return {"model": backbone | (heads or {}), "iteration": 89999}


def mmdetection(weights: dict, heads: dict | None = None) -> Contents:
    """Return the layout of LIT's detectors and segmentors."""
    backbone = {f"backbone.{name}": tensor for name, tensor in weights.items()}
    meta = {"epoch": 12, "iter": 87960, "mmdet_version": "2.10.0", "CLASSES": ("person", "bicycle")}
    return {"meta": meta, "state_dict": backbone | (heads or {})}


class HistoryBuffer:
    """The values of a loss, as in mmengine's log."""

    def __init__(self) -> None:
        self._log_history, self._count_history, self.max_length = np.array([0.5, 0.4]), np.array([1, 1]), 1000000


def save_mmdetection_3(weights: dict, heads: dict, path: Path) -> None:
    """Save a detector as mmengine's runner does: with its log, and the buffers of the preprocessing."""
    buffers = {f"data_preprocessor.{name}": torch.ones(3, 1, 1) for name in ("mean", "std")}
    contents = mmdetection(weights, heads | buffers)
    contents["meta"] = {"epoch": 12, "iter": 87960, "mmengine_version": "0.10.1", "dataset_meta": {"CLASSES": ("a",)}}
    log = {"log_scalars": {"train/loss": HistoryBuffer()}, "runtime_info": {"epoch": np.float64(12)}}
    module = types.ModuleType("mmengine.logging.history_buffer")
    module.HistoryBuffer, HistoryBuffer.__module__ = HistoryBuffer, module.__name__
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mmengine", "mmengine.logging", module.__name__):
            patch.setitem(sys.modules, name, module)
        torch.save({**contents, "message_hub": log, "param_schedulers": [{"last_step": 12}]}, path)


def mmsegmentation(weights: dict) -> Contents:
    return mmdetection(weights, mmdetection_heads(segmentor=True))


def mmdetection_heads(segmentor: bool = False) -> dict[str, torch.Tensor]:
    names = ["neck.lateral_convs.0.conv.weight", "neck.fpn_convs.1.conv.bias"]
    names += ["decode_head.conv_seg.weight"] if segmentor else ["bbox_head.retina_cls.weight", "rpn_head.rpn_cls.bias"]
    return {name: torch.ones(2) for name in names}
