"""Detectors with the weights of a file."""

from pathlib import Path

from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from projects_vil.checkpoint.detection_checkpoint import Checkpointer
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance, class_names
from projects_vil.config import number_of_classes


def build_detector(cfg: CfgNode, weights: str | Path) -> nn.Module:
    """The detector of ``cfg`` with the weights of a file, on the CPU and in eval mode.

    Raises:
        InputError: where the file is missing or does not fit.
    """
    return load_detector(cfg, weights)[0]


def load_detector(cfg: CfgNode, weights: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """As :func:`build_detector`, and the names of its classes.

    They are those that the checkpoint has, or else those of the config's datasets, or else numbers.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    detector = build_model(cfg)
    contents = Checkpointer(detector, cfg=cfg, complete=True).load(str(weights))
    classes = Provenance.of({PROVENANCE_KEY: contents.get(PROVENANCE_KEY)}).classes
    classes = classes or class_names(cfg, (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN))
    return detector.eval(), classes or tuple(map(str, range(number_of_classes(cfg)[1])))
