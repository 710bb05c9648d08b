"""The detectors of the table: trained ones where there are runs, else random ones that find something."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from backbones import InputError
from projects_vil.config import load_config

CONFIGS = Path(__file__).parents[3] / "configs/demo"
TABLE_FAMILIES = ("vil", "ls", "lit", "cvt")
# Of each detector, the families that configs/demo/DETECTOR_FAMILY_shapes.yaml is there for.
TABLE_DETECTORS = {"retinanet": TABLE_FAMILIES, "mask_rcnn": TABLE_FAMILIES, "cascade_mask_rcnn": ("vil",)}
# How much larger the last layers of an untrained detector are made; a cascade's predictors are numbered.
_FACTORS = {
    "head.cls_score": 60,
    "head.bbox_pred": 20,
    "objectness_logits": 60,
    "anchor_deltas": 20,
    "box_predictor.*cls_score": 60,
    "box_predictor.*bbox_pred": 200,
    "mask_head.predictor": 100,
}


@dataclass(frozen=True)
class Subject:
    """A detector of the table."""

    detector: str
    family: str
    cfg: CfgNode
    weights: Path
    is_trained: bool

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.detector}_{self.family}"


def lively_detector(cfg: CfgNode) -> nn.Module:
    """A detector in eval mode whose random predictors are large, so that scores and boxes are far apart."""
    torch.manual_seed(0)
    detector = build_model(cfg).eval()
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            for layer, factor in _FACTORS.items():
                if fnmatchcase(name, f"*{layer}.weight"):
                    parameter *= factor
    return detector


def make_subject(
    output: Path, runs: str | Path | None, detector: str, family: str, overrides: Sequence[str]
) -> Subject:
    """The trained run of that name, or, with a warning, random weights in ``output``, where its exports will be.

    Raises:
        InputError: where the folder cannot be written to, and for a config or override that cannot be used.
    """
    name = f"{detector}_{family}"
    try:
        (output / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {output}: {error.strerror}") from error
    if runs is not None:
        weights = Path(runs) / name / "model_final.pth"
        if weights.is_file():
            return Subject(detector, family, load_config(weights.with_name("config.yaml"), overrides), weights, True)
    missing = f"there is no {weights}" if runs is not None else "no --runs"
    print(f"warning: {name} has random weights, with large predictors: {missing}", file=sys.stderr, flush=True)
    cfg = load_config(CONFIGS / f"{name}_shapes.yaml", [*overrides, "MODEL.DEVICE", "cpu"])
    weights = output / name / "random.pth"
    torch.save({"model": lively_detector(cfg).state_dict()}, weights)
    return Subject(detector, family, cfg, weights, False)
