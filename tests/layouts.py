"""Contents of checkpoints in the layout of each official repository."""

import argparse

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


def mmsegmentation(weights: dict) -> Contents:
    return mmdetection(weights, mmdetection_heads(segmentor=True))


def mmdetection_heads(segmentor: bool = False) -> dict[str, torch.Tensor]:
    names = ["neck.lateral_convs.0.conv.weight", "neck.fpn_convs.1.conv.bias"]
    names += ["decode_head.conv_seg.weight"] if segmentor else ["bbox_head.retina_cls.weight", "rpn_head.rpn_cls.bias"]
    return {name: torch.ones(2) for name in names}
