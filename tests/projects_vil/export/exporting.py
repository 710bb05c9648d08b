"""Detectors that are traced in seconds, and the files that they are exported to."""

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import Tensor, nn

from projects_vil.export import FORMATS as KNOWN
from projects_vil.export import describe_model, example_image, make_exportable, metadata_path, write_model
from tests.projects_vil.helpers import small_config, untrained_detector

TRACED_SIZE = (96, 128)
_FEW_RCNN = (
    *("MODEL.RPN.IN_FEATURES", "['p3', 'p4', 'p5']", "MODEL.ROI_HEADS.IN_FEATURES", "['p3', 'p4']"),
    *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16], [32], [64]]", "MODEL.RPN.POST_NMS_TOPK_TEST", "100"),
)
# At these thresholds a detector finds nothing in a grey image, and something in a synthetic one.
ALL_LEVELS = {
    "retinanet": ("MODEL.RETINANET.SCORE_THRESH_TEST", "0.03"),
    "mask_rcnn": ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.6", "MODEL.RPN.POST_NMS_TOPK_TEST", "100"),
}
# Each level is traced and converted by itself: two or three take half the time of five.
FEW_LEVELS = {
    "retinanet": (
        *("MODEL.RETINANET.IN_FEATURES", "['p3', 'p4']", "MODEL.ANCHOR_GENERATOR.SIZES", "[[16], [32]]"),
        *("MODEL.RETINANET.SCORE_THRESH_TEST", "0.02"),
    ),
    "mask_rcnn": (*_FEW_RCNN, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.5"),
    "cascade_mask_rcnn": (*_FEW_RCNN, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.35"),
}


class Stem(Backbone):
    """Four convolutions, strides 4 to 32; the exports of our backbones, which take longer, have tests of their own."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, 2, 1) for _ in range(3)]
        self.layers = nn.ModuleList([nn.Conv2d(3, channels, 4, 4), *convolutions])
        self.channels = channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for index, layer in enumerate(self.layers, start=1):
            images = layer(images).relu()
            outputs[f"stage{index}"] = images
        return outputs

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {f"stage{i + 1}": ShapeSpec(channels=self.channels, stride=4 * 2**i) for i in range(4)}


def config(name: str, *, all_levels: bool = False) -> CfgNode:
    return small_config(name, *(ALL_LEVELS if all_levels else FEW_LEVELS)[name])


@functools.cache
def detector(name: str, *, all_levels: bool = False) -> nn.Module:
    """detectron2's FPN and heads on a few convolutions, of few levels or of as many as the papers have."""
    model = untrained_detector(config(name, all_levels=all_levels))
    torch.manual_seed(0)
    stem, stages = Stem(), ["stage1", "stage2", "stage3", "stage4"]
    top = LastLevelMaxPool() if name != "retinanet" else LastLevelP6P7(32, 32, "p5") if all_levels else None
    if not all_levels:
        stages = stages[1:3]
        if top is not None:
            top.in_feature = "p4"
    elif name == "retinanet":
        stages = stages[1:]
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter *= 1.7
    model.backbone = FPN(stem, stages, 32, top_block=top).eval()
    return model


def write(
    folder: Path,
    name: str,
    file_format: str,
    *,
    batched: bool = False,
    dtype: str = "uint8",
    all_levels: bool = False,
    fixed_number: int | None = None,
) -> Path:
    """A model and its metadata."""
    example = example_image(*TRACED_SIZE).to(getattr(torch, dtype))
    exportable = make_exportable(detector(name, all_levels=all_levels), batched=batched, fixed_number=fixed_number)
    path = folder / f"{name}{'_batched' if batched else ''}_{dtype}{KNOWN[file_format].suffix}"
    write_model(exportable, torch.stack([example] * 2) if batched else example, path, file_format)
    metadata = describe_model(
        config(name, all_levels=all_levels),
        exportable,
        classes=("circle", "square", "triangle"),
        file_format=file_format,
        precision="fp32",
        input_dtype=dtype,
        weights="random.pth",
    )
    metadata_path(path).write_text(json.dumps(metadata))
    return path


@functools.cache
def demo_detector(name: str) -> nn.Module:
    """Build the demo's detector with few channels, on a ViL with all levels; tracing takes a few seconds."""
    return untrained_detector(small_config(name))


def skip_without(file_format: str) -> None:
    """Skip a test of a format whose runtime is an extra that is not installed."""
    if file_format == "openvino" and importlib.util.find_spec("openvino") is None:
        pytest.skip("pip install -e '.[openvino]'")
