"""Variants and options: the sizes and parameter counts in the papers, the public functions, and their errors."""

import dataclasses

import pytest
import torch
from torch import nn

from backbones import ConfigError, create_backbone, create_classifier, list_variants
from backbones.build import get_variant
from backbones.layers.position import fit_table
from tests.backbones.helpers import random_images
from tests.selection import slow_except

DEMO = "vil_tiny_1_1_3_1_rpb"
# ViL Table 9: blocks, patch size, heads and channels of each stage
TABLE_9 = {
    "vil_tiny": "1,4,1,48 1,2,3,96 9,2,3,192 1,2,6,384",
    "vil_small": "1,4,3,96 2,2,3,192 8,2,6,384 1,2,12,768",
    "vil_medium_deep": "1,4,3,96 4,2,3,192 16,2,6,384 1,2,12,768",
    "vil_medium_wide": "1,4,3,192 2,2,6,384 8,2,8,512 1,2,12,768",
    "vil_base_deep": "1,4,3,96 8,2,3,192 24,2,6,384 1,2,12,768",
    "vil_base_wide": "1,4,3,192 2,2,6,384 8,2,12,768 1,2,16,1024",
    "vil_tiny_1_10_1": "1,8,3,96 10,2,3,192 1,2,6,384",
    "vil_tiny_2_9_1": "2,8,3,96 9,2,3,192 1,2,6,384",
    "vil_tiny_1_9_2": "1,8,3,96 9,2,3,192 2,2,6,384",
    "vil_tiny_2_8_2": "2,8,3,96 8,2,3,192 2,2,6,384",
    "vil_tiny_1_1_9_1": "1,4,1,48 1,2,3,96 9,2,3,192 1,2,6,384",
    "vil_tiny_1_2_8_1": "1,4,1,48 2,2,3,96 8,2,3,192 1,2,6,384",
    "vil_small_1_10_1": "1,8,3,192 10,2,6,384 1,2,12,768",
    "vil_small_2_9_1": "2,8,3,192 9,2,6,384 1,2,12,768",
    "vil_small_1_9_2": "1,8,3,192 9,2,6,384 2,2,12,768",
    "vil_small_2_8_2": "2,8,3,192 8,2,6,384 2,2,12,768",
    "vil_small_1_1_9_1": "1,4,3,96 1,2,3,192 9,2,6,384 1,2,12,768",
    "vil_small_1_2_8_1": "1,4,3,96 2,2,3,192 8,2,6,384 1,2,12,768",
    # Table 12
    "vil_tiny_1_1_8_2": "1,4,1,48 1,2,3,96 8,2,3,192 2,2,6,384",
    "vil_small_1_1_8_2": "1,4,3,96 1,2,3,192 8,2,6,384 2,2,12,768",
}
# LIT Table 1 and the official configurations of LITv2: blocks, channels, heads and expansion of each stage
LIT_TABLE_1 = {
    "lit_ti": "3,64,0,8 4,128,0,8 6,320,5,4 3,512,8,4",
    "lit_s": "2,96,0,4 2,192,0,4 6,384,12,4 2,768,24,4",
    "lit_m": "2,96,0,4 2,192,0,4 18,384,12,4 2,768,24,4",
    "lit_b": "2,128,0,4 2,256,0,4 18,512,16,4 2,1024,32,4",
}
LIT_TABLE_1 |= {f"litv2_{size}{ws}": LIT_TABLE_1[f"lit_{size}"] for size in "smb" for ws in ("", "_ws4")}
# One of each family, mechanism and type of position
FEW = ["vil_tiny", "vil_tiny_1_10_1_rpb", "evit_full_16_tiny", "ls_tiny", "lit_ti", "lit_s_seg", "litv2_s_ws4"]
FEW += ["cvt_ls_13", "global_tiny", "sra64_tiny", "performer_tiny", "partial_vil_tiny"]


def stages_of(row: str) -> list[tuple[int, ...]]:
    """Return the numbers of each stage in a row of the tables above."""
    return [tuple(map(int, stage.split(","))) for stage in row.split()]


def meta(create, name: str, **options) -> torch.nn.Module:
    with torch.device("meta"):
        return create(name, **options)


def count(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def test_names():
    names = list_variants()
    vil = [name for name in TABLE_9 if name.startswith("vil")] + ["vil_tiny_1_1_3_1"]
    partial = ("vil", "linformer", "sra32", "global", "performer")
    mechanisms = ["full", "linformer", "sra64", "sra32", "global", "performer", *map("partial_{}".format, partial)]
    columns = [f"{size}_{n}" for size in ("tiny", "small") for n in ("1_10_1", "2_9_1", "1_1_9_1", "1_2_8_1")]
    assert names == sorted(
        [*vil, *(f"{name}_rpb" for name in vil), "evit_full_16_tiny", "evit_full_16_small"]
        + [f"{mechanism}_{size}" for mechanism in mechanisms for size in ("tiny", "small", *columns)]
        + ["ls_tiny", "ls_small", "ls_medium", "ls_base", "ls_medium_384"]
        + ["cvt_ls_13", "cvt_ls_17", "cvt_ls_21", "cvt_ls_21s", "cvt_ls_21_384", "cvt_ls_21_448", "lit_ti"]
        + ["lit_s", "lit_m", "lit_b", "lit_s_seg", "lit_m_seg", "lit_b_seg", *[n for n in LIT_TABLE_1 if "v2" in n]]
    )
    assert list_variants("lit_") == ["lit_b", "lit_b_seg", "lit_m", "lit_m_seg", "lit_s", "lit_s_seg", "lit_ti"]


def test_sizes_of_vil():
    """Table 9 has the sizes. The flat models are E-ViT(full x 12/16; h, d, 1) of section 3.1 (Table 2)."""
    for name, stages in ((name, stages_of(row)) for name, row in TABLE_9.items()):
        variant = get_variant(name)
        assert [(s.depth, s.patch_size, s.heads, s.dim) for s in variant.stages] == stages, name
        assert [s.global_tokens for s in variant.stages] == [1] * (len(stages) - 1) + [0]
        assert {(s.chunk_size, s.attention) for s in variant.stages} == {(7, "sliding_chunk")}
        assert (variant.attention_mode, variant.shared_projections, variant.relative_bias) == ("zero_pad", True, False)
        assert get_variant(f"{name}_rpb") == dataclasses.replace(variant, relative_bias=True)
    for name, sizes in (("evit_full_16_tiny", (3, 192)), ("evit_full_16_small", (6, 384))):
        (stage,) = get_variant(name).stages
        assert (stage.attention, stage.depth, stage.patch_size, stage.global_tokens) == ("dense", 12, 16, 1)
        assert (stage.heads, stage.dim) == sizes


def test_sizes_of_lit():
    for name, row in LIT_TABLE_1.items():
        assert [(s.depth, s.dim, s.heads, s.expansion) for s in get_variant(name).stages] == stages_of(row), name


@pytest.mark.parametrize("name, window, heads", [("litv2_s", 2, (2, 10)), ("litv2_b_ws4", 4, (2, 14))])
def test_windows_of_litv2(name, window, heads):
    assert [stage.window_size for stage in get_variant(name).stages] == [1, 1, window, 1]
    hilo = meta(create_backbone, name).stages[2].blocks[0].attention
    assert (hilo.high_heads, hilo.low_heads) == heads


@pytest.mark.parametrize(
    "name, expected",
    [("vil_tiny_rpb", {1e-6}), ("lit_s", {1e-5}), ("litv2_s", {1e-5}), ("cvt_ls_13", {1e-5}), ("lit_ti", {1e-5, 1e-6})],
)
def test_epsilon_of_layer_norms(name, expected):
    """The official code does the same. The patch embedding of LIT-Ti has PyTorch's initialization."""
    modules = dict(meta(create_classifier, name).named_modules())
    norms = {key: norm.eps for key, norm in modules.items() if isinstance(norm, nn.LayerNorm)}
    assert set(norms.values()) == expected
    assert name != "lit_ti" or [key for key in norms if norms[key] == 1e-5] == ["backbone.stages.0.patch_embed.norm"]


def test_parameter_counts_with_uniform_merging():
    """The starred rows of LIT Table 3 leave out the head and are rounded down. published.yaml has the other rows."""
    for name, millions in (("lit_ti", 19), ("lit_s", 27)):
        model = meta(create_classifier, name, token_merging="uniform")
        assert int((count(model.parameters()) - count(model.head.parameters())) / 1e6) == millions, name


@pytest.mark.parametrize("name", slow_except(FEW, ["vil_tiny", "lit_ti"]))
def test_feature_maps_and_logits(name):
    model, stages = meta(create_backbone, name), get_variant(name).stages
    strides = {"cvt": [4, 8, 16], "evi": [16]}.get(name[:3], [4, 8, 16, 32][-len(stages) :])
    infos, dims = list(model.feature_info.values()), [stage.dim for stage in stages]
    assert [(info.channels, info.stride) for info in infos] == list(zip(dims, strides, strict=True))
    for height, width in ((37, 50), (800, 1333)):
        features = model(torch.empty(2, 3, height, width, device="meta"))
        shapes = [(2, info.channels, -(-height // info.stride), -(-width // info.stride)) for info in infos]
        assert list(features) == [f"stage{i + 1}" for i in range(len(stages))]
        assert [tuple(m.shape) for m in features.values()] == shapes
    classifier = meta(create_classifier, name, num_classes=7, img_size=(224, 160))
    assert classifier(torch.empty(2, 3, 224, 160, device="meta")).shape == (2, 7)
    ids = [model.layer_id(key) for key, _ in model.named_parameters() if not key.startswith("output_norms.")]
    assert ids == sorted(ids) and set(ids) == set(range(sum(stage.depth for stage in stages) + 1))


def test_initial_values():
    torch.manual_seed(0)
    for name in (DEMO, "lit_ti", "litv2_s"):
        model = create_backbone(name, out_features=("stage3",))
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                assert parameter.eq(1).all(), key
            elif "patch_embed.offset" in key:
                assert parameter.eq(0).all(), key
            elif "patch_embed" in key:
                # The weight of a convolution, or the bias of a norm
                assert parameter.eq(0).all() or parameter.std().item() > 0.01, key
            elif key.endswith("bias"):
                assert parameter.eq(0).all(), key
            elif key.endswith("depthwise.weight"):
                assert parameter.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.1), key
            elif parameter.numel() > 1000:
                assert parameter.std().item() == pytest.approx(0.02, rel=0.1), key
    assert not torch.equal(next(create_backbone(DEMO).parameters()), next(create_backbone(DEMO).parameters()))


def test_options():
    """``test_keys_set_the_options_of_the_backbone`` tests the others."""
    mixed = ["sliding_chunk", "dense", "long_short", "dense"]
    assert [stage.attention for stage in get_variant("vil_tiny", {"attention": mixed}).stages] == mixed
    model = meta(create_backbone, "cvt_ls_13", chunk_size=(12, 6, 3), projection_rank=(128, 32, 8))
    blocks = [stage.blocks[0].attention for stage in model.stages]
    assert [block.chunk_size for block in blocks] == [12, 6, 3]
    assert [len(block.dynamic_projection.pointwise.weight) for block in blocks] == [128, 96, 48]
    stages = meta(create_classifier, "vil_tiny", img_size=(384, 256)).backbone.stages
    assert [len(stage.positions.rows) for stage in stages] == [96, 48, 24, 12]
    assert [len(stage.positions.cols) for stage in stages] == [64, 32, 16, 8]


@pytest.mark.parametrize(
    "name, options, hint",
    [
        ("vil_smal_rpb", {}, "vil_smal_rpb.*'vil_small_rpb'"),
        ("q", {}, "'q'.*list_variants"),
        ("vil_tiny", {"chunk_sise": 1}, "'chunk_sise'.*'chunk_size'"),
    ],
)
def test_unknown_names_and_keywords(name, options, hint):
    for create in (create_backbone, create_classifier):
        with pytest.raises(ConfigError, match=hint):
            create(name, **options)


@pytest.mark.parametrize(
    "name, option",
    [
        ("vil_tiny", {"out_features": ("stage22",)}),
        ("cvt_ls_13", {"out_features": ()}),
        ("lit_ti", {"attention_backend": "triton"}),
        ("vil_tiny", {"max_img_size": (224, 224, 3)}),
        ("vil_tiny", {"drop_path_rate": -0.1}),
        ("vil_tiny", {"chunk_size": 0}),
        ("vil_tiny", {"chunk_size": (7, 7, 7)}),
        ("global_tiny", {"global_tokens": 0}),
        ("vil_tiny", {"projection_rank": 8}),
        ("vil_tiny", {"attention": "performer"}),
        ("vil_tiny", {"position_interpolation": "pixel"}),
        ("lit_s", {"chunk_size": 7}),
        ("lit_s", {"norm": "FrozenBN", "token_merging": "uniform"}),
    ],
    ids=str,
)
def test_wrong_options(name, option):
    with pytest.raises(ConfigError, match=next(iter(option))) as caught:
        meta(create_backbone, name, **option)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["linformer_tiny", "partial_linformer_small"])
def test_linformer_is_a_classifier_only(name):
    assert meta(create_classifier, name)(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)
    with pytest.raises(ConfigError, match=name):
        create_backbone(name)


@pytest.mark.parametrize("name", slow_except(["vil_tiny_1_1_3_1", "lit_s", "ls_tiny"], ["vil_tiny_1_1_3_1"]))
def test_both_position_interpolations_agree(name):
    """Tables are resized once for one image size, or to each feature map. For images of that size, both are equal."""
    height, width = 64, 160
    torch.manual_seed(0)
    each = create_backbone(name, position_interpolation="per_feature_map").double().eval()
    once = create_backbone(name, position_interpolation="once", max_img_size=(height, width)).double().eval()
    modules = dict(once.named_modules())
    for key, table in each.state_dict().items():
        path, _, leaf = key.rpartition(".")
        once.state_dict()[key].copy_(fit_table(table, modules[path], leaf))
    images = random_images(1, 3, height, width)
    with torch.no_grad():
        for stage, expected in each(images).items():
            torch.testing.assert_close(once(images)[stage], expected)


def test_pooling_by_the_global_token():
    model = create_classifier("vil_tiny_1_1_8_2", num_classes=3, pool="global_token", global_tokens=1).eval()
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.head(model.forward_features(images)[:, 0]))
    with pytest.raises(ConfigError, match="vil_tiny.*global_tokens=1"):
        create_classifier("vil_tiny", pool="global_token")
