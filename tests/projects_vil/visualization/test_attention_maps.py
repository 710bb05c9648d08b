"""Attention weights that give the module's own output back, for every mechanism, and their drawing."""

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from backbones import InputError
from backbones.attention import dense
from backbones.attention.alternatives.global_memory import GlobalMemoryAttention
from backbones.attention.alternatives.linformer import LinformerAttention
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.alternatives.spatial_reduction import SpatialReductionAttention
from backbones.attention.dense import DenseAttention, join_tokens
from backbones.attention.long_short import DualNormAttention, LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.cvt import ConvLongShortAttention
from projects_vil.visualization import draw_attention
from projects_vil.visualization.attention_maps import Attention, attention_of
from tests.backbones.helpers import random_images, randomise
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except

DIM, HEADS, HEIGHT, WIDTH = 8, 2, 7, 10
PLACES = [(0, 0), (3, 6), (6, 9)]


def case(kind: type, num_global: int = 0, **options):
    if kind is not ConvLongShortAttention:
        options["num_global_tokens"] = num_global
    return pytest.param(kind, num_global, options, id="-".join([kind.__name__, *map(str, options.values())]))


CASES = [
    case(DenseAttention),
    case(DenseAttention, 2, bias_size=(5, 4)),
    case(DenseAttention, 1, bias_size=(5, 4), update_globals=False),
    case(SlidingChunkAttention, 0, window_size=2),
    case(SlidingChunkAttention, 2, window_size=2, relative_bias=True, mode="exact"),
    case(SlidingChunkAttention, 1, window_size=2, mode="cyclic", shared_projections=False),
    case(SlidingChunkAttention, 1, window_size=5, relative_bias=True, update_globals=False),
    case(LongShortAttention, 0, window_size=2, rank=3),
    case(LongShortAttention, 2, window_size=3, rank=2, relative_bias=True),
    case(GlobalMemoryAttention, 3),
    case(SpatialReductionAttention, 0, reduction=3),
    case(SpatialReductionAttention, 2, reduction=8),
    case(SpatialReductionAttention, 1, reduction=1, update_globals=False),
    case(PerformerAttention, 0, num_features=6),
    case(PerformerAttention, 2, num_features=6),
    case(ConvLongShortAttention, 0, window_size=2, rank=3),
]
cases = pytest.mark.parametrize("kind, num_global, options", CASES)


def build(kind: type, num_global: int, options: dict) -> tuple[nn.Module, Tensor, Tensor | None]:
    """A random attention in float64 and eval mode, and its input."""
    module = randomise(kind(DIM, num_heads=HEADS, **options)).double().eval()
    global_tokens = random_images(1, num_global, DIM, seed=2) if num_global else None
    return module, random_images(1, HEIGHT, WIDTH, DIM), global_tokens


def inputs_of(layer: nn.Module, module: nn.Module, *inputs) -> list[Tensor]:
    """What a layer takes, call by call."""
    caught = []
    handle = layer.register_forward_pre_hook(lambda layer, args: caught.append(args[0].detach()))
    module(*inputs)
    handle.remove()
    return caught


def values_of(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None) -> dict[str, Tensor]:
    """The values (1, L, C) of the tokens, of projected or reduced keys, and of the global tokens."""
    if isinstance(module, DualNormAttention):
        values = module.qkv(tokens)[..., 2 * DIM :] if hasattr(module, "qkv") else module.value(tokens)
        values = module.local_norm(values).flatten(1, 2)
        shares = module.dynamic_projection(tokens).flatten(1, 2).softmax(dim=1)
        rank, width = shares.shape[2] // HEADS, DIM // HEADS
        sums = [shares[..., h * rank :][..., :rank].mT @ values[..., h * width :][..., :width] for h in range(HEADS)]
        parts = {"direct": values, "projected": module.projected_norm(torch.cat(sums, dim=2))}
        if global_tokens is not None:
            parts["to_globals"] = module.local_norm(module.qkv(global_tokens)[..., 2 * DIM :])
        return parts
    if isinstance(module, SlidingChunkAttention):
        values = {"direct": module.key_value(tokens).flatten(1, 2)[..., DIM:]}
        if global_tokens is not None:
            values["to_globals"] = module.key_value(global_tokens)[..., DIM:]
        return values
    if isinstance(module, GlobalMemoryAttention):
        return {"to_globals": module.key_value(global_tokens)[..., DIM:]}
    if isinstance(module, SpatialReductionAttention):
        (sequence,) = inputs_of(module.key_value, module, tokens, global_tokens)
        values = module.key_value(sequence)[..., DIM:]
    else:
        values = module.qkv(join_tokens(tokens, global_tokens))[..., 2 * DIM :]
    num_global = 0 if global_tokens is None else global_tokens.shape[1]
    name = "projected" if getattr(module, "reduction", 1) > 1 else "direct"
    return {"to_globals": values[:, :num_global], name: values[:, num_global:]}


@torch.no_grad()
def check(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None, row: int, col: int) -> Attention:
    """That weights are no less than 0, sum to 1, and with the values give the output before its projection."""
    attention = attention_of(module, tokens, global_tokens, row, col)
    parts = {"direct": attention.direct.flatten(1), "projected": attention.projected}
    parts["to_globals"] = attention.to_globals
    values = values_of(module, tokens, global_tokens)
    output = 0
    for name, weights in parts.items():
        assert not weights.requires_grad and (weights >= -1e-12).all()
        if name not in values:
            assert not weights.any()
            continue
        # (M, L) and (L, M, D)
        output = output + torch.einsum("ml,lmd->md", weights, values[name][0].unflatten(1, (HEADS, -1)))
    expected = inputs_of(module.projection, module, tokens, global_tokens)[0].flatten(0, -2)[-HEIGHT * WIDTH :]
    torch.testing.assert_close(output.flatten(), expected[row * WIDTH + col], rtol=1e-9, atol=1e-9)
    ones = torch.ones(HEADS, dtype=torch.float64)
    torch.testing.assert_close(sum(weights.sum(dim=1) for weights in parts.values()), ones)
    torch.testing.assert_close(attention.on_map.sum(dim=(1, 2)) + attention.to_globals.sum(dim=1), ones)
    return attention


@cases
def test_weights_and_values_give_the_output(kind, num_global, options):
    module, tokens, global_tokens = build(kind, num_global, options)
    for row, col in PLACES:
        attention = check(module, tokens, global_tokens, row, col)
    assert attention.on_map.shape == (HEADS, HEIGHT, WIDTH) and attention.to_globals.shape == (HEADS, num_global)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_rows_of_a_large_map_in_groups(monkeypatch):
    monkeypatch.setattr(dense, "_GROUP_SCORES", 300)
    module, tokens, global_tokens = build(DenseAttention, 2, {"num_global_tokens": 2, "bias_size": (5, 4)})
    check(module, tokens, global_tokens, 3, 6)


def test_softmax_by_hand():
    module, tokens, _ = build(DenseAttention, 0, {"num_global_tokens": 0})
    query, key = module.qkv(tokens.flatten(1, 2))[0, :, : 2 * DIM].unflatten(1, (2, HEADS, -1)).unbind(1)
    scores = torch.einsum("md,lmd->ml", query[3 * WIDTH + 6], key) * (DIM // HEADS) ** -0.5
    weights = attention_of(module, tokens, None, 3, 6).direct.flatten(1)
    torch.testing.assert_close(weights, scores.softmax(dim=1))


def test_a_window_is_all_that_sliding_chunks_see():
    module, tokens, _ = build(SlidingChunkAttention, 0, {"num_global_tokens": 0, "window_size": 2})
    seen = attention_of(module, tokens, None, 3, 6).direct > 0
    expected = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    expected[0:6, 4:10] = True
    assert (seen == expected).all()


def test_projected_weights_go_where_the_projection_comes_from():
    module, tokens, _ = build(LongShortAttention, 0, {"num_global_tokens": 0, "window_size": 2, "rank": 3})
    attention = attention_of(module, tokens, None, 3, 6)
    shares = module.dynamic_projection(tokens)[0].flatten(0, 1).softmax(dim=0)
    for head in range(HEADS):
        expected = shares[:, 3 * head : 3 * head + 3] @ attention.projected[head]
        torch.testing.assert_close(attention.spread[head].flatten(), expected)


def test_a_reduced_place_is_spread_over_its_tokens():
    module, tokens, _ = build(SpatialReductionAttention, 0, {"num_global_tokens": 0, "reduction": 3})
    attention = attention_of(module, tokens, None, 3, 6)
    assert attention.projected.shape == (HEADS, 2 * 3) and not attention.direct.any()
    places = attention.spread[:, :6, :9].unflatten(2, (3, 3)).unflatten(1, (2, 3))
    expected = (attention.projected / 9).unflatten(1, (2, 3))[:, :, None, :, None].expand_as(places)
    torch.testing.assert_close(places, expected)
    # A last row and column that fill no place are not seen.
    assert not attention.spread[:, 6:].any() and not attention.spread[:, :, 9:].any()


def test_weights_that_are_none():
    options = {"num_global_tokens": 0, "map_size": (HEIGHT, WIDTH), "num_features": 5}
    with pytest.raises(InputError, match="LinformerAttention has no attention weights"):
        attention_of(*build(LinformerAttention, 0, options), 0, 0)


# -- drawing ---------------------------------------------------------------------------------------


@pytest.fixture
def photo(tmp_path):
    noise = np.random.default_rng(0).integers(60, 120, (50, 75, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "photo.png"), noise)
    return tmp_path / "photo.png"


def draw(photo, *overrides: str, stage: int = 3, block: int = 1, point=(20, 30), **options):
    cfg = small_config("retinanet", *overrides)
    return draw_attention(cfg, None, photo, photo.parent / "drawn", stage=stage, block=block, point=point, **options)


VARIANTS = [
    ("vil_tiny", 3, 4),
    ("ls_tiny", 2, 7),
    ("sra32_tiny", 2, 4),
    ("performer_tiny", 2, 4),
    ("lit_ti", 3, 6),
    ("cvt_ls_13", 2, 7),
]


@pytest.mark.parametrize("name, stage, panels", slow_except(VARIANTS, ["cvt_ls_13"]))
def test_a_panel_for_the_image_and_each_head(photo, monkeypatch, name, stage, panels):
    sheets = []
    monkeypatch.setattr("projects_vil.visualization.attention_maps.in_rows", lambda p, columns: sheets.append(p) or [p])
    features = ["MODEL.FPN.IN_FEATURES", "['stage1', 'stage2', 'stage3']"] if name.startswith("cvt") else []
    path = draw(photo, "MODEL.TRANSFORMER.NAME", name, *features, stage=stage)
    assert path == photo.parent / f"drawn/photo_{name}_stage{stage}_block1_20_30.png"
    assert len(sheets[0]) == panels
    drawn = cv2.imread(str(path)).astype(int)
    assert drawn.shape[1] > 480 * panels
    # The query is framed in every panel.
    for _, panel in sheets[0]:
        assert (panel == (0, 255, 0)).all(axis=2).any()


def test_a_window_is_enlarged_and_framed(photo, monkeypatch):
    sheets = []
    monkeypatch.setattr("projects_vil.visualization.attention_maps.in_rows", lambda p, columns: sheets.append(p) or [p])
    large = ["INPUT.MIN_SIZE_TEST", "640", "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 1, 1, 1]"]
    draw(photo, *large, stage=2, point=(0, 74))
    (_, whole), (title, head), *_ = sheets[0]
    yellow = np.argwhere((whole == (255, 255, 0)).all(axis=2))
    # Two chunks below the corner and 8 tokens left of it are 14 x 8, drawn as 16 x 16 tokens of 8 pixels, halved;
    # the line is a pixel wider than the frame.
    assert yellow.min(axis=0).tolist() == [0, 480 - 64 - 1] and yellow.max(axis=0).tolist() == [64, 480 - 1]
    assert head.shape == (480, 480, 3) and " each, globals " in title


@pytest.mark.parametrize(
    "overrides, options, message",
    [
        ([], {"stage": 5}, "--stage is 5: the backbone has the stages 1 to 4"),
        ([], {"stage": 0}, "--stage is 0"),
        ([], {"block": 4}, "--block is 4: stage 3 has the blocks 1 to 3"),
        ([], {"point": (50, 30)}, "--point 50 30 is outside .*photo.png, which is 50 pixels high and 75 wide"),
        ([], {"point": (0, -1)}, "--point 0 -1 is outside"),
        (["MODEL.TRANSFORMER.NAME", "lit_ti"], {"stage": 2}, "--stage is 2: its blocks are MLPs, without attention"),
        (["MODEL.TRANSFORMER.NAME", "global_tiny"], {}, "stage 3 look at its 64 global tokens alone"),
        (["MODEL.BACKBONE.NAME", "build_resnet_backbone"], {}, "build_resnet_backbone: none of this project's"),
    ],
)
def test_what_cannot_be_drawn(photo, overrides, options, message):
    if "build_resnet_backbone" in overrides:
        overrides = [*overrides, "MODEL.RETINANET.IN_FEATURES", "['res4']", "MODEL.RESNETS.OUT_FEATURES", "['res4']"]
        overrides += ["MODEL.ANCHOR_GENERATOR.SIZES", "[[32]]"]
    with pytest.raises(InputError, match=message) as caught:
        draw(photo, *overrides, **options)
    assert "\n" not in str(caught.value)
    assert not (photo.parent / "drawn").exists()


def test_images_that_cannot_be_read(photo, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for name in ("absent.png", "text.png"):
        with pytest.raises(InputError, match=f"cannot read the image .*{name}"):
            draw(tmp_path / name)
