"""Detectors that trace in seconds, and their exported files."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from torch import Tensor, nn

from backbones import ConfigError
from backbones.build import VARIANTS
from projects_vil.data import Categories
from projects_vil.export import FORMATS, check_format, describe_model, example_image, make_exportable, metadata_path
from tests.projects_vil.helpers import small_config, untrained_detector

TRACED_SIZE = (96, 128)
SHAPES = Categories((0, 1, 2), ("circle", "square", "triangle"))
# Each feature level is traced and converted separately: two or three take half the time of five. With these score
# thresholds, a detector finds objects in synthetic images and none in gray ones.
_RCNN = "MODEL.RPN.IN_FEATURES ['p3','p4','p5'] MODEL.ROI_HEADS.IN_FEATURES ['p3','p4'] MODEL.ANCHOR_GENERATOR.SIZES "
_RCNN += "[[16],[32],[64]] MODEL.RPN.POST_NMS_TOPK_TEST 100 MODEL.ROI_HEADS.SCORE_THRESH_TEST "
FEW_LEVELS = {
    "retinanet": "MODEL.RETINANET.IN_FEATURES ['p3','p4'] MODEL.ANCHOR_GENERATOR.SIZES [[16],[32]] "
    "MODEL.RETINANET.SCORE_THRESH_TEST 0.02",
    "mask_rcnn": _RCNN + "0.5",
    "cascade_mask_rcnn": _RCNN + "0.35",
}


class Stem(Backbone):
    """Four convolutions with strides 4 to 32. Other tests export the transformers, which take longer."""

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


def config(name: str) -> CfgNode:
    return small_config(name, *FEW_LEVELS[name].split())


@functools.cache
def detector(name: str) -> nn.Module:
    """Return detectron2's FPN and heads on :class:`Stem`."""
    model = untrained_detector(config(name))
    torch.manual_seed(0)
    stem = Stem()
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter *= 1.7
    top = None if name == "retinanet" else LastLevelMaxPool()
    if top is not None:
        top.in_feature = "p4"
    model.backbone = FPN(stem, ["stage2", "stage3"], 32, top_block=top).eval()
    return model


def write(
    folder: Path,
    name: str,
    file_format: str,
    *,
    batched: bool = False,
    dtype: str = "uint8",
    fixed_number: int | None = None,
) -> Path:
    """Write a model and its metadata, and return its path."""
    example = example_image(*TRACED_SIZE).to(getattr(torch, dtype))
    exportable = make_exportable(detector(name), batched=batched, fixed_number=fixed_number)
    path = folder / f"{name}{'_batched' if batched else ''}_{dtype}{FORMATS[file_format].suffix}"
    with pytest.MonkeyPatch.context() as patch:
        if fixed_number or not batched:  # int8 files are quantized from the others, which use direct convolutions
            # The small detectors have 32 channels.
            patch.setattr("projects_vil.export.formats._WINOGRAD_CHANNELS", 16)
        FORMATS[file_format].write(exportable, torch.stack([example] * 2) if batched else example, path)
    facts = {"precision": "fp32", "input_dtype": dtype, "weights": "random.pth"}
    metadata = describe_model(config(name), exportable, SHAPES, file_format, **facts)
    FORMATS[file_format].embed(path, metadata)
    metadata_path(path).write_text(json.dumps(metadata))
    return path


@functools.cache
def demo_detector(name: str, *overrides: str) -> nn.Module:
    """Return a demo detector with few channels, on a ViL with all feature levels. It traces in a few seconds."""
    return untrained_detector(small_config(name, *overrides))


@contextlib.contextmanager
def shallow_variants(depth: int) -> Iterator[None]:
    """Limit stages to ``depth`` blocks. Deeper ones have the same operators and take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        for key, variant in list(VARIANTS.items()):
            stages = tuple(dataclasses.replace(stage, depth=min(stage.depth, depth)) for stage in variant.stages)
            patch.setitem(VARIANTS, key, dataclasses.replace(variant, stages=stages))
        yield


def skip_without(file_format: str) -> None:
    """Skip a test if this machine cannot write a format."""
    try:
        check_format(file_format)
    except ConfigError as error:
        pytest.skip(str(error))


def onnx_file(folder: Path, nodes: str, *, weights: str = "", output: str = "float") -> Path:
    """Write an ONNX file of nodes in ONNX's text syntax, from ``x`` (n, 4) to ``y``, and return its path."""
    onnx = pytest.importorskip("onnx")
    header = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]> graph'
    model = onnx.parser.parse_model(f"{header} (float[n, 4] x) => ({output}[n, 4] y) <{weights}> {{ {nodes} }}")
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"
