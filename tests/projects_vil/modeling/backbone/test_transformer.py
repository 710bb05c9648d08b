"""The builders: names, shapes as announced and as they are, frozen stages, all of MODEL.TRANSFORMER."""

import functools
import math

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from detectron2.modeling.backbone.fpn import LastLevelP6P7
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from backbones import InputError
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.modeling import TransformerBackbone, build_transformer_backbone
from projects_vil.modeling.backbone.fpn import CoarserLevels
from tests.projects_vil.helpers import small_config

RGB = ShapeSpec(channels=3)
LEVELS = {
    "retinanet": {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128},
    "mask_rcnn": {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64},
}
BOTTOM_UP = {
    "retinanet": {"stage2": (96, 8), "stage3": (192, 16), "stage4": (384, 32)},
    "mask_rcnn": {"stage1": (48, 4), "stage2": (96, 8), "stage3": (192, 16), "stage4": (384, 32)},
}


@functools.cache
def fpn(detector: str) -> nn.Module:
    torch.manual_seed(0)
    return build_backbone(small_config(detector)).eval()


def bottom_up(*overrides: str) -> TransformerBackbone:
    return build_transformer_backbone(small_config("mask_rcnn", *overrides), RGB)


def images(height: int = 70, width: int = 101) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["build_transformer_fpn_backbone", "build_retinanet_transformer_fpn_backbone"])
def test_builders_are_registered(name):
    assert name in BACKBONE_REGISTRY


@pytest.mark.parametrize("detector", LEVELS)
def test_announced_shapes(detector):
    shapes = fpn(detector).output_shape()
    assert {name: shape.stride for name, shape in shapes.items()} == LEVELS[detector]
    assert {shape.channels for shape in shapes.values()} == {32}
    below = fpn(detector).bottom_up.output_shape()
    assert {name: (shape.channels, shape.stride) for name, shape in below.items()} == BOTTOM_UP[detector]
    assert fpn(detector).size_divisibility == fpn(detector).bottom_up.size_divisibility == 32


@pytest.mark.parametrize("detector", LEVELS)
def test_maps_have_the_announced_shapes(detector):
    height, width = 96, 160
    with torch.no_grad():
        maps = fpn(detector)(images(height, width))
    assert {name: tuple(m.shape) for name, m in maps.items()} == {
        name: (1, 32, math.ceil(height / stride), math.ceil(width / stride))
        for name, stride in LEVELS[detector].items()
    }


@pytest.mark.parametrize("height, width", [(70, 101), (33, 5)])
def test_bottom_up_takes_an_odd_image(height, width):
    with torch.no_grad():
        maps = fpn("mask_rcnn").bottom_up(images(height, width))
    assert {name: tuple(m.shape) for name, m in maps.items()} == {
        name: (1, channels, math.ceil(height / stride), math.ceil(width / stride))
        for name, (channels, stride) in BOTTOM_UP["mask_rcnn"].items()
    }


def test_detector_pads_an_odd_image_for_fpn():
    detector = build_model(small_config()).eval()
    batch = detector.preprocess_image([{"image": images(70, 101)[0]}, {"image": images(97, 64)[0]}])
    assert batch.tensor.shape == (2, 3, 128, 128)
    with torch.no_grad():
        assert {name: tuple(m.shape[2:]) for name, m in detector.backbone(batch.tensor).items()} == {
            "p3": (16, 16), "p4": (8, 8), "p5": (4, 4), "p6": (2, 2), "p7": (1, 1)
        }  # fmt: skip


def test_three_stages_in_retinanet():
    overrides = ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_10_1"]
    overrides += ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"]
    detector = build_model(small_config("retinanet", *overrides)).eval()
    shapes = detector.backbone.output_shape()
    assert {name: shape.stride for name, shape in shapes.items()} == LEVELS["retinanet"]
    assert detector.backbone.size_divisibility == 32
    with torch.no_grad():
        instances = detector([{"image": images(64, 96)[0] * 255, "height": 30, "width": 45}])[0]["instances"]
    assert instances.image_size == (30, 45)
    boxes = instances.pred_boxes.tensor
    assert len(boxes) and boxes.min() >= 0 and (boxes <= torch.tensor([45, 30, 45, 30])).all()


def test_top_levels_come_from_the_last_map():
    backbone = fpn("retinanet")
    assert (backbone.top_block.in_feature, backbone.top_block.p6.in_channels) == ("stage4", 384)
    with torch.no_grad():
        maps = backbone(images(64, 96))
        p6 = backbone.top_block.p6(backbone.bottom_up(images(64, 96))["stage4"])
    torch.testing.assert_close(maps["p6"], p6)


def test_out_features_default_to_those_of_fpn():
    assert list(bottom_up().output_shape()) == ["stage1", "stage2", "stage3", "stage4"]
    cfg = small_config("retinanet", "MODEL.TRANSFORMER.OUT_FEATURES", "['stage1', 'stage2', 'stage3', 'stage4']")
    assert list(build_transformer_backbone(cfg, RGB).output_shape()) == [
        "stage1",
        "stage2",
        "stage3",
        "stage4",
    ]


@pytest.mark.parametrize("stages", [0, 1, 3, 4])
def test_freeze_at(stages):
    backbone = bottom_up("MODEL.BACKBONE.FREEZE_AT", str(stages)).train()
    for index, stage in enumerate(backbone.net.stages):
        assert {p.requires_grad for p in stage.parameters()} == {index >= stages}
    if stages < 4:
        sum(m.sum() for m in backbone(images()).values()).backward()
        has_gradient = {int(name.split(".")[2]) for name, p in backbone.named_parameters() if p.grad is not None}
        assert has_gradient == set(range(stages, 4))


@pytest.mark.parametrize("stages", [-1, 5])
def test_freeze_at_out_of_range(stages):
    with pytest.raises(InputError, match=f"FREEZE_AT is {stages}: .* 4 stages"):
        bottom_up("MODEL.BACKBONE.FREEZE_AT", str(stages))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["MODEL.TRANSFORMER.NAME", "vil_smal_rpb"],
            "unknown variant 'vil_smal_rpb'; did you mean 'vil_small_rpb'",
        ),
        (["MODEL.FPN.IN_FEATURES", "['stage1', 'stage5']"], "MODEL.FPN.IN_FEATURES has stage5"),
        (
            ["MODEL.TRANSFORMER.OUT_FEATURES", "['stage2']"],
            "IN_FEATURES has stage1, which .*OUT_FEATURES lacks",
        ),
        (
            ["MODEL.TRANSFORMER.ATTENTION_MODE", "cyclik"],
            "unknown attention mode 'cyclik'.*did you mean 'cyclic'",
        ),
        (["MODEL.TRANSFORMER.ATTENTION_BACKEND", "flash"], "unknown attention backend 'flash'"),
        (["MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 2]"], "global_tokens"),
        (["MODEL.TRANSFORMER.MAX_IMG_SIZE", "0"], "max_img_size"),
        (["MODEL.TRANSFORMER.WINDOW_SIZE", "[7, 7]"], "window_size"),
    ],
)
def test_mistakes_in_the_keys(overrides, message):
    with pytest.raises(InputError, match=message):
        bottom_up(*overrides)


def test_other_than_three_channels():
    with pytest.raises(InputError, match="3 channels, and MODEL.PIXEL_MEAN has 1"):
        build_transformer_backbone(small_config(), ShapeSpec(channels=1))


def attentions(backbone: nn.Module) -> list[SlidingChunkAttention]:
    return [module for module in backbone.modules() if isinstance(module, SlidingChunkAttention)]


@pytest.mark.parametrize("mode", ["exact", "cyclic"])
def test_attention_mode_arrives(mode):
    default, other = bottom_up().eval(), bottom_up("MODEL.TRANSFORMER.ATTENTION_MODE", mode).eval()
    assert {attention.mode for attention in attentions(default)} == {"zero_pad"}
    assert {attention.mode for attention in attentions(other)} == {mode}
    other.load_state_dict(default.state_dict())
    large = images(100, 130)
    with torch.no_grad():
        difference = (default(large)["stage1"] - other(large)["stage1"]).abs().max()
    assert difference > 1e-5


def test_attention_backend_arrives():
    default, other = bottom_up().eval(), bottom_up("MODEL.TRANSFORMER.ATTENTION_BACKEND", "reference").eval()
    assert {attention.backend for attention in attentions(default)} == {"auto"}
    assert {attention.backend for attention in attentions(other)} == {"reference"}
    other.load_state_dict(default.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(other(images()), default(images()), rtol=1e-4, atol=1e-4)


def test_global_tokens_arrive():
    counts = [
        None if stage.global_tokens is None else stage.global_tokens.shape[1]
        for stage in bottom_up("MODEL.TRANSFORMER.GLOBAL_TOKENS", "[2, 0, 1, 1]").net.stages
    ]
    assert counts == [2, None, 1, 1]


def test_window_sizes_arrive():
    sizes = [a.window_size for a in attentions(bottom_up("MODEL.TRANSFORMER.WINDOW_SIZE", "[3, 4, 5, 6]"))]
    assert sizes == [3, 4, 5, 5, 5, 6]
    assert {attention.window_size for attention in attentions(bottom_up())} == {7}


def test_separate_projections_arrive():
    separate = bottom_up("MODEL.TRANSFORMER.SHARED_PROJECTIONS", "False")
    assert any("global_query" in name for name, _ in separate.named_parameters())
    assert not any("global_query" in name for name, _ in bottom_up().named_parameters())


def test_drop_path_grows_to_the_key():
    stages = bottom_up("MODEL.TRANSFORMER.DROP_PATH", "0.25").net.stages
    rates = [block.drop_path_rate for stage in stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25])


def test_max_img_size_arrives():
    overrides = ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1", "MODEL.TRANSFORMER.MAX_IMG_SIZE", "100"]
    stages = bottom_up(*overrides).net.stages
    assert [len(stage.positions.rows) for stage in stages] == [32, 16, 8, 4]
    with pytest.raises(InputError, match="MODEL.TRANSFORMER.MAX_IMG_SIZE"):
        bottom_up(*overrides)(images(100, 160))


def test_activation_checkpointing_saves_less_and_changes_nothing():
    default, other = bottom_up(), bottom_up("MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING", "True")
    other.load_state_dict(default.state_dict())
    (saved, gradients), (saved_less, same_gradients) = map(backward, (default.train(), other.train()))
    assert saved_less < saved / 2
    assert gradients.keys() == same_gradients.keys()
    torch.testing.assert_close(same_gradients, gradients)


def backward(backbone: nn.Module) -> tuple[int, dict[str, torch.Tensor]]:
    """How many elements the forward pass keeps, and every parameter's gradient."""
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = sum(m.square().mean() for m in backbone(images()).values())
    total.backward()
    return saved, {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}


CVT_STAGES = {"retinanet": "['stage2', 'stage3']", "mask_rcnn": "['stage1', 'stage2', 'stage3']"}


@pytest.mark.parametrize("detector", LEVELS)
def test_a_backbone_that_ends_at_stride_16_gets_its_coarser_levels_from_fpn(detector):
    stages = ["MODEL.FPN.IN_FEATURES", CVT_STAGES[detector]]
    backbone = build_backbone(small_config(detector, "MODEL.TRANSFORMER.NAME", "cvt_ls_13", *stages)).eval()
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == LEVELS[detector]
    height, width = 96, 160
    with torch.no_grad():
        maps = backbone(images(height, width))
    assert {name: tuple(m.shape) for name, m in maps.items()} == {
        name: (1, 32, math.ceil(height / stride), math.ceil(width / stride))
        for name, stride in LEVELS[detector].items()
    }
    p5 = {"retinanet": 384, "mask_rcnn": 32}[detector]
    assert (backbone.top_block.p5.in_channels, backbone.top_block.p5.stride) == (p5, (2, 2))


# docs/training.md has those of Mask R-CNN.
FLAT = {
    "retinanet": ["MODEL.RETINANET.IN_FEATURES", "['p4', 'p5', 'p6', 'p7']"],
    "mask_rcnn": ["MODEL.RPN.IN_FEATURES", "['p4', 'p5', 'p6']", "MODEL.ROI_HEADS.IN_FEATURES", "['p4', 'p5']"],
}


@pytest.mark.parametrize("detector", LEVELS)
def test_a_flat_model_gives_fpn_one_map(detector):
    """The E-ViT of ViL Table 2: levels from P4 on, and gradients for all that makes them."""
    flat = ["MODEL.TRANSFORMER.NAME", "evit_full_16_tiny", "MODEL.FPN.IN_FEATURES", "['stage1']"]
    anchors = ["MODEL.ANCHOR_GENERATOR.SIZES", "[[32, 64, 128, 256, 512]]"]
    torch.manual_seed(0)
    model = build_model(small_config(detector, *flat, *FLAT[detector], *anchors))
    backbone = model.backbone.train()
    levels = {name: stride for name, stride in LEVELS[detector].items() if stride >= 16}
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == levels
    assert backbone.bottom_up.output_shape()["stage1"] == ShapeSpec(channels=192, stride=16)
    maps = backbone(images(96, 160))
    assert {name: tuple(m.shape) for name, m in maps.items()} == {
        name: (1, 32, math.ceil(96 / stride), math.ceil(160 / stride)) for name, stride in levels.items()
    }
    sum((m * torch.randn_like(m)).sum() for m in maps.values()).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
    with torch.no_grad():
        instances = model.eval()([{"image": images()[0] * 255, "height": 30, "width": 45}])[0]["instances"]
    assert instances.image_size == (30, 45)


def test_two_coarser_levels_are_those_of_detectron2():
    ours = CoarserLevels(12, 8, "stage4", first_level=6, num_convolutions=2)
    theirs = LastLevelP6P7(12, 8, "stage4")
    theirs.load_state_dict(ours.state_dict())
    map_ = torch.randn(1, 12, 7, 9)
    for level, expected in zip(ours(map_), theirs(map_), strict=True):
        torch.testing.assert_close(level, expected)
    assert ours.num_levels == theirs.num_levels == 2


@pytest.mark.parametrize("name", ["build_transformer_fpn_backbone", "build_retinanet_transformer_fpn_backbone"])
def test_levels_that_end_too_early_raise(name):
    cfg = small_config("retinanet", "MODEL.FPN.IN_FEATURES", "['stage1', 'stage2']", "MODEL.BACKBONE.NAME", name)
    with pytest.raises(InputError, match="ends with stage2, of stride 8: the last one has 16 or 32"):
        build_backbone(cfg)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["MODEL.TRANSFORMER.NAME", "lit_ti", "MODEL.TRANSFORMER.RANK", "[8]"], "lit_ti has no option rank"),
        (["MODEL.TRANSFORMER.MERGING", "uniform"], "has no option merging"),
        (["MODEL.TRANSFORMER.NAME", "linformer_tiny"], "linformer_tiny cannot be a backbone"),
        (["MODEL.TRANSFORMER.ATTENTION", "['dense']"], "one a stage"),
    ],
)
def test_options_of_other_families_raise(overrides, message):
    with pytest.raises(InputError, match=message):
        bottom_up(*overrides)


def test_options_of_the_other_families_are_passed_on():
    lit = ["MODEL.TRANSFORMER.NAME", "lit_ti", "MODEL.TRANSFORMER.BATCH_NORM", "frozen"]
    assert any(isinstance(m, FrozenBatchNorm2d) for m in bottom_up(*lit).modules())
    uniform = bottom_up("MODEL.TRANSFORMER.NAME", "lit_ti", "MODEL.TRANSFORMER.MERGING", "uniform")
    assert not any("offset" in name for name, _ in uniform.named_parameters())
    long_short = ["MODEL.TRANSFORMER.ATTENTION", "['long_short', 'long_short', 'long_short', 'long_short']"]
    modules = list(bottom_up(*long_short, "MODEL.TRANSFORMER.RANK", "[1, 2, 3, 4]").modules())
    ranks = [m.dynamic_projection.out_features // m.num_heads for m in modules if isinstance(m, LongShortAttention)]
    assert ranks == [1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    "detector, overrides, message",
    [
        ("retinanet", ["MODEL.FPN.IN_FEATURES", "['stage3']"], "MODEL.RETINANET.IN_FEATURES has p3, and FPN makes p4"),
        ("mask_rcnn", ["MODEL.FPN.IN_FEATURES", "['stage3', 'stage4']"], "MODEL.RPN.IN_FEATURES has p2"),
        ("retinanet", ["MODEL.FPN.IN_FEATURES", "['stage2', 'stage4']"], "of strides .8, 32.: each is twice"),
        ("retinanet", ["MODEL.FPN.IN_FEATURES", "[]"], "MODEL.FPN.IN_FEATURES is empty"),
        (
            "retinanet",
            ["MODEL.TRANSFORMER.NAME", "cvt_ls_13"],
            "MODEL.FPN.IN_FEATURES has stage4, and cvt_ls_13 has stage1, stage2, stage3",
        ),
    ],
)
def test_levels_that_do_not_fit_raise(detector, overrides, message):
    with pytest.raises(InputError, match=message):
        build_backbone(small_config(detector, *overrides))


def test_images_are_padded_to_whole_places_of_the_coarsest_level_of_heads():
    stages = ["MODEL.FPN.IN_FEATURES", CVT_STAGES["mask_rcnn"]]
    backbone = build_backbone(small_config("mask_rcnn", "MODEL.TRANSFORMER.NAME", "cvt_ls_13", *stages))
    assert (backbone.size_divisibility, backbone.bottom_up.size_divisibility) == (32, 16)
