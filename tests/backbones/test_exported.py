"""ViL, ViL-LS and CvT-LS exported once are right for images of other sizes, in torch and in ONNX."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from backbones.backbone import BackboneSettings
from backbones.vil import ViL
from tests.backbones.exporting import SIZES, OnnxSession, export_backbone
from tests.backbones.families import small_model
from tests.backbones.helpers import FAMILIES, random_images, randomise, small_variant

ONE_STAGE = ("absolute", "no_globals", "many_globals", "separate", "exact", "cyclic", "global", "long_short")
# Sliding chunks, and then long-short attention
MIXED = {"attention": ("sliding_chunk", "long_short") * 2, "global_tokens": 2, "relative_bias": True}
OPTIONS = {"mixed": MIXED} | {name: FAMILIES[name] for name in ONE_STAGE}


def build(family: str) -> nn.Module:
    """A small model: one stage of stride 32, with one position or more, or two stages one after the other."""
    if family == "cvt":
        return small_model("cvt", out_features=("stage1", "stage2"))
    variant = small_variant(**OPTIONS[family])
    sizes = ((4, 1), (8, 2)) if family == "mixed" else ((32, 2),)
    stages = zip(variant.stages, sizes, strict=False)
    stages = tuple(dataclasses.replace(stage, patch_size=patch, depth=depth) for stage, (patch, depth) in stages)
    variant = dataclasses.replace(variant, stages=stages)
    return randomise(ViL(variant, BackboneSettings(max_img_size=(1344, 1344)))).double().eval()


@functools.cache
def exported(family: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, ExportedProgram]:
    model = build(family).to(dtype)
    return model, export_backbone(model, random_images(2, 3, 96, 160, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("family", ("cvt", *OPTIONS))
def test_an_exported_backbone_is_right_for_other_sizes(family):
    """With the guards of the exported program checked at each size."""
    model, program = exported(family)
    module = program.module()
    for height, width in SIZES:
        images = random_images(1 + height % 2, 3, height, width)
        with torch.no_grad():
            actual, expected = module(images), model(images)
        assert actual.keys() == expected.keys()
        for name, feature in expected.items():
            torch.testing.assert_close(actual[name], feature, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
def test_an_exported_backbone_refuses_what_it_was_not_made_for():
    _, program = exported("absolute")
    with pytest.raises(AssertionError, match="1344"):
        program.module()(random_images(1, 3, 32, 1376))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixed", "cvt", "cyclic"])
def test_an_onnx_file_is_right_for_other_sizes(family):
    model, program = exported(family, torch.float32)
    session = OnnxSession(program)
    for height, width in SIZES:
        images = random_images(1 + height % 2, 3, height, width, dtype=torch.float32)
        with torch.no_grad():
            expected = model(images).values()
        for actual, feature in zip(session(images), expected, strict=True):
            assert (actual - feature).abs().max() < 1e-4 * feature.abs().max()
