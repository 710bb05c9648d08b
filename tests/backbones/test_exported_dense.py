"""LIT, and ViL with mechanisms other than its own, exported once and right at other sizes, in torch and in ONNX."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torchvision.ops import deform_conv2d

from backbones.attention import dense
from backbones.layers.token_merging import deformable_by_sampling
from backbones.lit import LITVariant
from tests.backbones.exporting import SIZES, OnnxSession, export_backbone
from tests.backbones.families import small_lit
from tests.backbones.helpers import LargestTensor, random_images, small_vil
from tests.backbones.official_lit import TI, S

LARGEST = (420, 420)
# The tables of the small models are so small that their maps would be seen in one group.
GROUPS = 3


def lit(variant: LITVariant, out_features: tuple[str, ...] | None = None, **options) -> nn.Module:
    stages = tuple(dataclasses.replace(stage, depth=1) for stage in variant.stages)
    variant = dataclasses.replace(variant, stages=stages).with_options(**options)
    return small_lit(variant, max_img_size=LARGEST, out_features=out_features)


# In float32 those that go on to ONNX
FAMILIES = {
    "lit_absolute": (lambda: lit(TI), torch.float32),
    "lit_relative": (lambda: lit(S, ("stage2", "stage3")), torch.float32),
    "lit_absolute_load": (
        lambda: lit(TI, ("stage1",), merging="uniform", position_resizing="load"),
        torch.float64,
    ),
    "lit_relative_load": (lambda: lit(S, merging="uniform", position_resizing="load"), torch.float64),
    "dense_relative": (
        lambda: small_vil("dense_relative", max_img_size=LARGEST, out_features=("stage2",)),
        torch.float32,
    ),
    "spatial_reduction": (lambda: small_vil("spatial_reduction", max_img_size=LARGEST), torch.float64),
    "performer": (lambda: small_vil("performer", max_img_size=LARGEST), torch.float64),
}
IN_ONNX = [family for family, (_, dtype) in FAMILIES.items() if dtype == torch.float32]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5}


@functools.cache
def exported(family: str) -> tuple[nn.Module, ExportedProgram, torch.dtype]:
    build, dtype = FAMILIES[family]
    model = build().to(dtype)
    for module in model.modules():
        if isinstance(module, dense.DenseAttention) and module.relative_bias is not None:
            module.num_groups = GROUPS
    return model, export_backbone(model, random_images(2, 3, 96, 128, dtype=dtype)), dtype


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_backbone_is_right_for_other_sizes(family):
    """With the guards of the exported program checked at each size."""
    model, program, dtype = exported(family)
    module = program.module()
    for height, width in SIZES:
        images = random_images(1 + height % 2, 3, height, width, dtype=dtype)
        with torch.no_grad():
            actual, expected = module(images), model(images)
        assert actual.keys() == expected.keys()
        for name, feature in expected.items():
            assert actual[name].shape == feature.shape
            assert (actual[name] - feature).abs().max() < TOLERANCE[dtype] * feature.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_ONNX)
def test_an_onnx_file_is_right_for_other_sizes(family):
    model, program, dtype = exported(family)
    session = OnnxSession(program)
    for height, width in SIZES:
        images = random_images(1 + height % 2, 3, height, width, dtype=dtype)
        with torch.no_grad():
            expected = model(images).values()
        for actual, feature in zip(session(images), expected, strict=True):
            assert actual.shape == feature.shape
            assert (actual - feature).abs().max() < 1e-4 * feature.abs().max()


@pytest.mark.slow
def test_an_exported_lit_needs_no_operator_of_torchvision():
    _, program, _ = exported("lit_absolute")
    # A region without autocast is a graph of its own.
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    names = {str(node.target) for graph in graphs for node in graph.nodes}
    assert any("grid_sampl" in name for name in names) and not any("torchvision" in name for name in names)


@pytest.mark.parametrize("stride, height, width", [(2, 6, 8), (2, 2, 2), (2, 4, 10), (3, 6, 9)])
@pytest.mark.parametrize("scale", [0.4, 5.0])
def test_sampling_and_a_plain_convolution_are_a_deformable_one(stride, height, width, scale):
    """Outputs and gradients; with the larger scale many positions lie beyond the map."""
    features, weight, bias = (
        random_images(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate([(2, 3, height, width), (4, 3, stride, stride), (4,)])
    )
    offset = scale * random_images(2, 2 * stride**2, height // stride, width // stride, seed=5)
    # On the edge of what is seen, and beyond it
    offset[0, :, 0, 0] = torch.tensor([-1.0, 0.0]).repeat(stride**2)
    offset.requires_grad_()
    inputs = (features, offset, weight, bias)
    results = []
    for function in (deform_conv2d, deformable_by_sampling):
        output = function(*inputs, stride=stride)
        weights = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape)
        results.append([output, *torch.autograd.grad((output * weights).sum(), (features, weight, bias))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("num_global", [0, 2])
def test_groups_of_a_exported_run_change_nothing(monkeypatch, groups, num_global):
    """Fewer rows than groups, more, and a number that they do not divide."""
    module = dense.DenseAttention(8, num_heads=2, num_global_tokens=num_global, bias_size=(3, 5)).double()
    module.num_groups = groups
    for height, width in ((7, 4), (3, 6), (1, 1), (10, 2)):
        tokens, global_tokens = random_images(2, height, width, 8), None
        if num_global:
            global_tokens = random_images(2, num_global, 8, seed=2)
        with torch.no_grad():
            expected = module(tokens, global_tokens)
            monkeypatch.setattr(dense, "is_tracing", lambda: True)
            actual = module(tokens, global_tokens)
            monkeypatch.undo()
        for one, other in zip(actual, expected, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_a_exported_run_holds_a_part_of_the_bias():
    _, program, dtype = exported("lit_relative")
    images = random_images(1, 3, 640, 640, dtype=dtype)
    with torch.no_grad(), LargestTensor() as largest:
        program.module()(images)
    heads, tokens = S.stages[2].heads, 40 * 40
    assert largest.numel < heads * tokens**2 / 2
    assert dense.DenseAttention(8, num_heads=2, bias_size=(50, 50)).num_groups == 3
    assert dense.DenseAttention(8, num_heads=2, bias_size=(25, 25)).num_groups == 1
