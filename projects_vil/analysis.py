"""Parameters by part and FLOPs of a detector, beside what the papers state."""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.analysis import FlopCountAnalysis
from torch import nn

from backbones import create_backbone, create_classifier

# Parameters in millions and FLOPs in units of 1e9 multiply-adds at 800 x 1333: ViL Tables 6 and 7.
PUBLISHED = {
    ("RetinaNet", "vil_tiny"): (16.64, 171.91),
    ("RetinaNet", "vil_small"): (35.68, 252.21),
    ("RetinaNet", "vil_medium_deep"): (50.77, 338.93),
    ("RetinaNet", "vil_base_deep"): (66.74, 443.0),
    ("GeneralizedRCNN", "vil_tiny"): (26.9, 94.3),
    ("GeneralizedRCNN", "vil_small"): (45.0, 174.3),
    ("GeneralizedRCNN", "vil_medium_deep"): (60.1, 261.1),
    ("GeneralizedRCNN", "vil_base_deep"): (76.1, 365.1),
}
# ViL Table 4: parameters in millions of the classifiers with 1000 classes.
PUBLISHED_CLASSIFIERS = {
    "vil_tiny": 6.7,
    "vil_small": 24.6,
    "vil_medium_deep": 39.7,
    "vil_medium_wide": 39.8,
    "vil_base_deep": 55.7,
    "vil_base_wide": 79.0,
}


@dataclasses.dataclass
class Analysis:
    """Counts of one detector.

    Attributes:
        name: the config's.
        parameters: of each part of the detector.
        total: of all parts, what is trained here.
        as_published: of the same detector as the paper counts it: with absolute positions (for images of up to 1333
            pixels) and the classification head (1000 classes) and norm that the official detectors carry and never use.
        published_parameters: in millions, or None.
        classifier: of the paper's classifier of that size, absolute positions for 224 x 224, 1000 classes.
        published_classifier: in millions, or None.
        flops: multiply-adds at ``size``, attention included, or None where they were not counted.
        flops_by_operator: the same by operator.
        published_flops: in 1e9, or None.
        size: height and width in pixels of the image for ``flops``.
    """

    name: str
    parameters: dict[str, int]
    total: int
    as_published: int
    published_parameters: float | None
    classifier: int
    published_classifier: float | None
    flops: int | None
    flops_by_operator: dict[str, int]
    published_flops: float | None
    size: tuple[int, int]


def analyze(cfg: CfgNode, name: str, *, size: tuple[int, int] = (800, 1333), with_flops: bool = True) -> Analysis:
    """Count the parameters of a detector and, on one image of ``size``, its multiply-adds.

    The image is dim noise, and the weights are random: what depends on the number of detections is small.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    variant = cfg.MODEL.TRANSFORMER.NAME
    absolute = variant.removesuffix("_rpb")
    with torch.device("meta"):
        classifier = create_classifier(absolute)
        backbone = create_backbone(absolute, max_img_size=1333)
    parts = parameters_by_part(model)
    total = sum(parts.values())
    paper_extra = sum(map(_count, (backbone, classifier.norm, classifier.head))) - parts["backbone"]
    by_operator = count_flops(model, size) if with_flops else {}
    published = PUBLISHED.get((cfg.MODEL.META_ARCHITECTURE, absolute), (None, None))
    return Analysis(
        name=name,
        parameters=parts,
        total=total,
        as_published=total + paper_extra,
        published_parameters=published[0],
        classifier=_count(classifier),
        published_classifier=PUBLISHED_CLASSIFIERS.get(absolute),
        flops=sum(by_operator.values()) if with_flops else None,
        flops_by_operator=by_operator,
        published_flops=published[1],
        size=size,
    )


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of the backbone, of FPN, and of every other direct part of a detector."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        if part == "backbone":
            part = "backbone" if name.startswith("backbone.bottom_up.") else "fpn"
        parts[part] += parameter.numel()
    return dict(parts)


def count_flops(model: nn.Module, size: tuple[int, int]) -> dict[str, int]:
    """Multiply-adds by operator for one image (height, width), by fvcore; attention's two products are counted.

    The products are counted as they are computed, with the keys of padding and the channel that marks them.
    """
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3, *size, generator=generator) * 60
    counter = FlopCountAnalysis(model, [{"image": image}])
    counter.set_op_handle("aten::scaled_dot_product_attention", _attention_flops)
    counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    logger = logging.getLogger("fvcore.nn.jit_analysis")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.no_grad():
            return {operator: int(flops) for operator, flops in counter.by_operator().items()}
    finally:
        logger.setLevel(level)


def format_analyses(analyses: Sequence[Analysis]) -> str:
    """The counts as text: a block for each detector, or one table for several."""
    if len(analyses) == 1:
        return _format_one(analyses[0])
    header = ("config", "params M", "as published", "paper", "classifier M", "paper", "GFLOPs", "paper")
    rows = [header] + [
        (
            a.name,
            f"{a.total / 1e6:.2f}",
            f"{a.as_published / 1e6:.2f}",
            _optional(a.published_parameters),
            f"{a.classifier / 1e6:.2f}",
            _optional(a.published_classifier),
            _optional(None if a.flops is None else a.flops / 1e9, ".1f"),
            _optional(a.published_flops),
        )
        for a in analyses
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    )


def as_json(analyses: Sequence[Analysis]) -> list[dict[str, Any]]:
    """The counts as plain dictionaries."""
    return [dataclasses.asdict(analysis) for analysis in analyses]


def _format_one(a: Analysis) -> str:
    lines = [a.name] + [f"  {part:<22}{number / 1e6:9.3f} M" for part, number in a.parameters.items()]
    lines.append(f"  {'all':<22}{a.total / 1e6:9.3f} M  trained here")
    lines.append(
        f"  {'as published':<22}{a.as_published / 1e6:9.3f} M  with absolute positions, and the classification head "
        f"and norm that the official detectors never use; paper: {_optional(a.published_parameters)}"
    )
    lines.append(
        f"  {'classifier':<22}{a.classifier / 1e6:9.3f} M  absolute positions, 1000 classes; paper: "
        f"{_optional(a.published_classifier)}"
    )
    if a.flops is not None:
        lines.append(f"  multiply-adds at {a.size[0]} x {a.size[1]}, 1e9; paper: {_optional(a.published_flops)}")
        for operator, flops in sorted(a.flops_by_operator.items(), key=lambda item: -item[1]):
            lines.append(f"    {operator:<22}{flops / 1e9:9.2f}")
        lines.append(f"    {'all':<22}{a.flops / 1e9:9.2f}")
    return "\n".join(lines)


def _attention_flops(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    query, key, value = (_shape(entry) for entry in inputs[:3])
    pairs = math.prod(query[:-1]) * key[-2]
    return Counter({"attention": pairs * (query[-1] + value[-1])})


def _shape(entry: Any) -> list[int]:
    return entry.type().sizes()


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _optional(value: float | None, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)
