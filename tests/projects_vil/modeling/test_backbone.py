"""Backbone builders: FPN levels, frozen stages, and the keys of MODEL.TRANSFORMER."""

import copy
import functools
import math

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.backbone.fpn import LastLevelP6P7
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.modeling import TransformerBackbone, build_on_meta, build_transformer_backbone
from projects_vil.modeling.backbone import LastLevelConvs, amp_dtype, eval_dtype
from tests.projects_vil.export.exporting import shallow_variants
from tests.projects_vil.helpers import message, small_config

RGB = ShapeSpec(channels=3)
LEVELS = {
    "retinanet": {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128},
    "mask_rcnn": {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64},
}
_CVT = ["MODEL.TRANSFORMER.VARIANT", "cvt_ls_13", "MODEL.FPN.IN_FEATURES"]
_FLAT = ["MODEL.TRANSFORMER.VARIANT", "evit_full_16_tiny", "MODEL.FPN.IN_FEATURES", "['stage1']"]
_FLAT += ["MODEL.ANCHOR_GENERATOR.SIZES", "[[32, 64, 128, 256, 512]]"]
# As in docs/training.md.
_FLAT_RCNN = ["MODEL.RPN.IN_FEATURES", "['p4', 'p5', 'p6']", "MODEL.ROI_HEADS.IN_FEATURES", "['p4', 'p5']"]
_THREE = ["MODEL.TRANSFORMER.VARIANT", "vil_tiny_1_10_1", "MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"]
# FPN adds missing levels. The flat E-ViT of ViL's table 2 has one feature map, of stride 16.
FPNS = {
    "retinanet": ("retinanet", []),
    "mask_rcnn": ("mask_rcnn", []),
    "three stages": ("retinanet", _THREE),
    "retinanet, stride 16": ("retinanet", [*_CVT, "['stage2', 'stage3']"]),
    "mask_rcnn, stride 16": ("mask_rcnn", [*_CVT, "['stage1', 'stage2', 'stage3']"]),
    "retinanet, flat": ("retinanet", [*_FLAT, "MODEL.RETINANET.IN_FEATURES", "['p4', 'p5', 'p6', 'p7']"]),
    "mask_rcnn, flat": ("mask_rcnn", [*_FLAT, *_FLAT_RCNN]),
}


def bottom_up(*overrides: str) -> TransformerBackbone:
    return build_transformer_backbone(small_config("mask_rcnn", *overrides), RGB)


def images(height: int = 70, width: int = 101) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("variant", "rate"),
    # LIT: detection/configs/lit and classification/code_for_lit_s_m_b/configs of the official repository. ViL: the
    # README of the official detection repository.
    [("lit_ti", 0.1), ("lit_s", 0.2), ("lit_m", 0.3), ("lit_b_seg", 0.5), ("vil_small_rpb", 0.1), ("ls_base", 0.3)],
)
def test_the_drop_path_rate_is_the_variants(variant, rate):
    with torch.device("meta"):
        backbone = bottom_up("MODEL.TRANSFORMER.VARIANT", variant, "MODEL.TRANSFORMER.DROP_PATH", "None")
    assert backbone.net.stages[-1].blocks[-1].drop_path_rate == pytest.approx(rate)


@pytest.mark.parametrize("detector, overrides", FPNS.values(), ids=FPNS)
def test_levels_of_fpn(detector, overrides):
    """Levels have their strides, sizes and gradients, and boxes stay inside of images with padding."""
    torch.manual_seed(0)
    cfg = small_config(detector, *overrides)
    with shallow_variants(1):
        model = build_model(cfg)
    backbone = model.backbone.train()
    levels = {name: stride for name, stride in LEVELS[detector].items() if stride >= 16 or _FLAT[1] not in overrides}
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == levels
    assert {shape.channels for shape in backbone.output_shape().values()} == {32}
    assert backbone.size_divisibility == 32
    assert list(backbone.bottom_up.output_shape()) == cfg.MODEL.FPN.IN_FEATURES
    if _CVT[1] in overrides:
        assert backbone.top_block.p5.in_channels == {"retinanet": 384, "mask_rcnn": 32}[detector]
    features = backbone(images(96, 160))
    shapes = {name: (1, 32, math.ceil(96 / stride), math.ceil(160 / stride)) for name, stride in levels.items()}
    assert {name: tuple(m.shape) for name, m in features.items()} == shapes
    sum((m * torch.randn_like(m)).sum() for m in features.values()).backward()
    assert all(p.grad is not None for name, p in backbone.named_parameters() if "dynamic_projection.bias" not in name)
    inputs = [{"image": images(h, w)[0] * 255, "height": 30, "width": 45} for h, w in ((70, 101), (97, 64))]
    with torch.no_grad():
        found = [output["instances"] for output in model.eval()(inputs)]
    for instances in found:
        assert instances.image_size == (30, 45)
        boxes = instances.pred_boxes.tensor
        assert len(boxes) and boxes.min() >= 0 and (boxes <= torch.tensor([45, 30, 45, 30])).all()


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("MODEL.TRANSFORMER.VARIANT", "cvt_ls_13", "Unknown out_features 'stage4'"),
        ("MODEL.TRANSFORMER.OUT_FEATURES", "['stage2']", "'stage4' (KeyError)"),
        ("MODEL.TRANSFORMER.ATTENTION_MODE", "cyclik", "cyclic"),
        ("MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 2]", "global_tokens"),
        ("MODEL.BACKBONE.FREEZE_AT", "9", "MODEL.BACKBONE.FREEZE_AT is 9, but vil_tiny"),
        ("MODEL.BACKBONE.FREEZE_AT", "-1", "has 4 stages. Use 0 to 4."),
        ("MODEL.TRANSFORMER.TOKEN_MERGING", "uniform", "token_merging"),
        ("MODEL.FPN.IN_FEATURES", "['stage3', 'stage4']", "'p2' (KeyError)"),
        ("MODEL.FPN.IN_FEATURES", "['stage2', 'stage4']", "not log2 contiguous"),
    ],
)
def test_invalid_keys_are_named(key, value, named):
    assert named in message(build_on_meta, small_config("mask_rcnn", key, value))


def modules_of(backbone: nn.Module, module_type: type) -> list:
    return [module for module in backbone.modules() if isinstance(module, module_type)]


def test_keys_set_the_options_of_the_backbone():
    keys = ["ATTENTION_BACKEND", "reference", "GLOBAL_TOKENS", "[2, 0, 1, 1]", "CHUNK_SIZE", "[3, 4, 5, 6]"]
    keys += ["SHARED_PROJECTIONS", "False", "DROP_PATH", "0.25", "ATTENTION_MODE", "cyclic"]
    keys += ["VARIANT", "vil_tiny_1_1_3_1", "MAX_IMG_SIZE", "100", "ACTIVATION_CHECKPOINTING", "True"]
    keys = [f"MODEL.TRANSFORMER.{key}" if key.isupper() else key for key in keys]
    backbone = bottom_up(*keys, "MODEL.BACKBONE.FREEZE_AT", "2")
    attentions = modules_of(backbone, SlidingChunkAttention)
    assert {(attention.backend, attention.mode) for attention in attentions} == {("reference", "cyclic")}
    assert [attention.chunk_size for attention in attentions] == [3, 4, 5, 5, 5, 6]
    stages = backbone.net.stages
    assert all(stage.activation_checkpointing for stage in stages)
    assert [{p.requires_grad for p in stage.parameters()} for stage in stages] == [{False}, {False}, {True}, {True}]
    assert [stage.global_tokens.shape[1] for stage in stages if stage.global_tokens is not None] == [2, 1, 1]
    assert any("global_query" in name for name, _ in backbone.named_parameters())
    rates = [block.drop_path_rate for stage in stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25])
    assert [len(stage.positions.rows) for stage in stages] == [32, 16, 8, 4]
    assert "MODEL.TRANSFORMER.MAX_IMG_SIZE" in message(backbone, images(100, 160))
    # Options of the other families.
    lit = ["MODEL.TRANSFORMER.VARIANT", "lit_ti"]
    with torch.device("meta"):
        assert modules_of(bottom_up(*lit, "MODEL.TRANSFORMER.NORM", "FrozenBN"), FrozenBatchNorm2d)
        uniform = bottom_up(*lit, "MODEL.TRANSFORMER.TOKEN_MERGING", "uniform")
    assert not any("offset" in name for name, _ in uniform.named_parameters())
    long_short = ["MODEL.TRANSFORMER.ATTENTION", str(["long_short"] * 4)]
    long_short = bottom_up(*long_short, "MODEL.TRANSFORMER.PROJECTION_RANK", "[1, 2, 3, 4]")
    ranks = [a.dynamic_projection.out_features // a.num_heads for a in modules_of(long_short, LongShortAttention)]
    assert ranks == [1, 2, 3, 3, 3, 4]


@pytest.mark.slow
def test_a_compiled_backbone_has_the_same_weights_and_features(monkeypatch):
    graphs = []
    backend = functools.partial(torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph)
    monkeypatch.setattr(torch, "compile", backend)
    keys = ["MODEL.TRANSFORMER.VARIANT", "vil_tiny_1_1_3_1_rpb", "MODEL.TRANSFORMER.DROP_PATH", "0.0"]
    keys += ["MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING", "True"]
    eager, compiled = (bottom_up(*keys, "MODEL.TRANSFORMER.COMPILE", value) for value in ("False", "True"))
    compiled.load_state_dict(eager.state_dict(), strict=True)
    features = [backbone.double().train()(images().double()) for backbone in (eager, compiled)]
    # A copy, as for averaged weights, is not compiled.
    copy.deepcopy(compiled)(images().double())
    assert len(graphs) == 1
    torch.testing.assert_close(features[1], features[0])


def test_two_extra_levels_equal_detectron2():
    ours = LastLevelConvs(12, 8, "stage4", (6, 7)).double()
    theirs = LastLevelP6P7(12, 8, "stage4").double()
    theirs.load_state_dict(ours.state_dict())
    features = torch.randn(1, 12, 7, 9).double()
    for level, expected in zip(ours(features), theirs(features), strict=True):
        torch.testing.assert_close(level, expected)
    assert ours.num_levels == theirs.num_levels == 2


@pytest.mark.parametrize(
    "device, capability, keys, trained, evaluated",
    [
        ("cuda:1", (8, 0), [], torch.bfloat16, torch.bfloat16),
        ("cuda:1", (7, 5), [], torch.float16, torch.float16),
        ("cuda:1", (7, 5), ["SOLVER.AMP.DTYPE", "bfloat16"], torch.bfloat16, torch.bfloat16),
        ("cuda:1", (7, 5), ["INFERENCE.DTYPE", "float32"], torch.float16, torch.float32),
        ("cuda:1", (8, 0), ["SOLVER.AMP.ENABLED", "False"], torch.bfloat16, torch.float32),
        ("cpu", None, [], torch.bfloat16, torch.float32),
        ("cpu", None, ["INFERENCE.DTYPE", "bfloat16"], torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes_of_training_and_evaluation(monkeypatch, device, capability, keys, trained, evaluated):
    """On a GPU, evaluations use the dtype of training. The capability is the one of MODEL.DEVICE."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", {"cuda:1": capability}.__getitem__)
    cfg = small_config("retinanet", "MODEL.DEVICE", device, "SOLVER.AMP.ENABLED", "True", *keys)
    assert (amp_dtype(cfg), eval_dtype(cfg)) == (trained, evaluated)
