"""Every mechanism as a module equals its definition, also in a trace and in the last block of a stage."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import cpu_blocks, efficient, reference
from backbones.attention.dense import DenseAttention, join_tokens, merge_heads, split_heads
from backbones.attention.hilo import HiLoAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.errors import ConfigError
from tests.backbones.attention.cases import attend
from tests.backbones.helpers import assert_all_close, random_images, randomize

_CHUNKS = functools.partial(SlidingChunkAttention, chunk_size=3, relative_bias=True)
_SEGMENTS = functools.partial(LongShortAttention, rank=2, relative_bias=True)
# Mechanisms with a reference backend.
WINDOWS = {
    "sliding_chunk": _CHUNKS,
    "sliding_chunk_exact": functools.partial(_CHUNKS, mode="exact"),
    "sliding_chunk_cyclic": functools.partial(_CHUNKS, mode="cyclic"),
    "sliding_chunk_separate": functools.partial(_CHUNKS, shared_projections=False),
    "long_short": functools.partial(_SEGMENTS, chunk_size=3),
    "long_short_1": functools.partial(_SEGMENTS, chunk_size=1),
}
OTHERS = {
    "dense": DenseAttention,
    "dense_bias": functools.partial(DenseAttention, bias_size=(3, 5)),
    "global": efficient.GlobalMemoryAttention,
    "linformer": functools.partial(efficient.LinformerAttention, map_size=(5, 7), num_features=4),
    "performer": functools.partial(efficient.PerformerAttention, num_features=12),
    **{f"sra{r}": functools.partial(efficient.SpatialReductionAttention, reduction=r) for r in (1, 2, 3, 8)},
}
ALL = WINDOWS | OTHERS
num_globals = pytest.mark.parametrize("num_global", [0, 1, 2])


def build(name: str, num_global: int, **options) -> nn.Module:
    return randomize(ALL[name](8, num_heads=2, num_global_tokens=num_global, **options)).double()


def inputs_for(num_global: int, height: int = 5, width: int = 7) -> tuple[Tensor, Tensor | None]:
    tokens = random_images(2, height, width, 8)
    return tokens, random_images(2, num_global, 8, seed=2) if num_global else None


def reduced_map(module: efficient.SpatialReductionAttention, tokens: Tensor) -> Tensor:
    """Return the reduced map by loops over positions. Incomplete patches are left out, unless there are no others."""
    side, (height, width) = module.reduction, tokens.shape[1:3]
    if side == 1:
        return tokens.flatten(1, 2)
    padded = nn.functional.pad(tokens, (0, 0, 0, max(side - width, 0), 0, max(side - height, 0)))
    positions = [
        torch.einsum("bijc,ocij->bo", padded[:, row : row + side, col : col + side], module.reduce.weight)
        for row in range(0, padded.shape[1] - side + 1, side)
        for col in range(0, padded.shape[2] - side + 1, side)
    ]
    reduced = torch.stack(positions, dim=1)
    variance, mean = torch.var_mean(reduced, dim=1, keepdim=True, unbiased=False)
    return (reduced - mean) / (variance + 1e-5).sqrt()


def definition(name: str, module: nn.Module, tokens: Tensor, global_tokens: Tensor | None) -> Tensor:
    """Return the output of the reference for all tokens, (B, G + H * W, C)."""
    sequence, num_global = join_tokens(tokens, global_tokens), 0 if global_tokens is None else global_tokens.shape[1]
    kernel, bias = reference.attention, None
    if hasattr(module, "qkv"):
        query, key, value = module.qkv(sequence).chunk(3, dim=-1)
        if name == "performer":
            kernel = functools.partial(reference.performer_attention, features=module.features)
    else:
        seen = sequence
        if name.startswith("sra"):
            seen = reduced_map(module, tokens)
            seen = seen if global_tokens is None else torch.cat([global_tokens, seen], dim=1)
        query, (key, value) = module.query(sequence), module.key_value(seen).chunk(2, dim=-1)
    if name == "linformer":
        key, value = (torch.einsum("bnc,nk->bkc", x, module.project_length) for x in (key, value))
    if name == "dense_bias":
        bias = module.relative_bias(*tokens.shape[1:3])
    if name == "global":
        bias = torch.zeros(sequence.shape[1], sequence.shape[1], dtype=torch.float64)
        bias[num_global:, num_global:] = float("-inf")
    heads = [split_heads(x, 2) for x in (query, key, value)]
    return module.proj(merge_heads(kernel(*heads) if bias is None else kernel(*heads, bias=bias)))


@pytest.mark.parametrize("name", OTHERS)
@num_globals
def test_module_equals_its_definition(name, num_global):
    if name == "global" and not num_global:
        pytest.skip("there is nothing to see")
    module, inputs = build(name, num_global), inputs_for(num_global)
    expected = definition(name, module, *inputs)
    output, global_output = attend(module, *inputs)
    torch.testing.assert_close(output.flatten(1, 2), expected[:, num_global:], atol=1e-10, rtol=1e-10)
    if num_global:
        torch.testing.assert_close(global_output, expected[:, :num_global], atol=1e-10, rtol=1e-10)
    else:
        assert global_output is None


@pytest.mark.parametrize("name", ALL)
def test_block_without_global_updates_gives_the_same_maps(name):
    module, last = build(name, 2), build(name, 2, update_globals=False)
    missing, unused = last.load_state_dict(module.state_dict(), strict=False)
    assert not missing and all("global_" in key for key in unused)
    output, none = attend(last, *inputs_for(2))
    assert none is None
    torch.testing.assert_close(output, attend(module, *inputs_for(2))[0], atol=1e-12, rtol=1e-12)


def outputs_and_gradients_of(module: nn.Module, num_global: int, height: int, width: int, run=None) -> dict:
    module.zero_grad(set_to_none=True)
    tokens, global_tokens = (x if x is None else x.requires_grad_() for x in inputs_for(num_global, height, width))
    outputs = [x for x in (attend if run is None else run)(module, tokens, global_tokens) if x is not None]
    sum((x * torch.sin(torch.arange(x.numel())).view_as(x)).sum() for x in outputs).backward()
    values = {"tokens": tokens.grad} | dict(enumerate(outputs))
    return values | {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", [*WINDOWS, "dense_bias", "performer"])
@num_globals
def test_gradients_match_reference_at_several_sizes(monkeypatch, name, num_global):
    ours, check = (build(name, num_global, backend=backend) for backend in ("sdpa", "reference"))
    for height, width, block_scores in ((7, 10, 2000), (12, 5, 1), (2, 3, 2**20)):
        monkeypatch.setattr(cpu_blocks, "BLOCK_SCORES", block_scores)
        expected = outputs_and_gradients_of(check, num_global, height, width)
        assert_all_close(outputs_and_gradients_of(ours, num_global, height, width), expected, tolerance=1e-9)


def hilo_by_windows(module: HiLoAttention, tokens: Tensor, global_tokens: None) -> tuple[Tensor]:
    """Return the output (B, H * W, C) of HiLo attention by loops over windows, padded with zeros."""
    (height, width), side = tokens.shape[1:3], module.window_size
    padded, means = F.pad(tokens, (0, 0, 0, -width % side, 0, -height % side)), []
    high = padded.new_zeros(*padded.shape[:3], module.high_proj.in_features)
    for row in range(0, padded.shape[1], side):
        for col in range(0, padded.shape[2], side):
            window = slice(None), slice(row, row + side), slice(col, col + side)
            inside = padded[window].flatten(1, 2)
            qkv = split_heads(module.high_qkv(inside), 3 * module.high_heads).chunk(3, dim=1)
            high[window] = merge_heads(reference.attention(*qkv)).unflatten(1, (side, side))
            means.append(inside.mean(dim=1))
    keys_values = split_heads(module.key_value(torch.stack(means, dim=1)), 2 * module.low_heads).chunk(2, dim=1)
    low = reference.attention(split_heads(module.query(tokens.flatten(1, 2)), module.low_heads), *keys_values)
    high = module.high_proj(high[:, :height, :width].flatten(1, 2))
    return (torch.cat([high, module.proj(merge_heads(low))], dim=2).unflatten(1, (height, width)),)


@pytest.mark.parametrize("height, width", [(6, 9), (5, 7), (7, 3), (2, 1)])
def test_hilo_equals_its_definition(height, width):
    """Outputs and gradients, also if the sides are no multiples of the window."""
    options = {"num_heads": 4, "window_size": 3, "alpha": 0.5}
    ours, check = (randomize(HiLoAttention(8, **options, backend=one)).double() for one in ("sdpa", "reference"))
    expected = outputs_and_gradients_of(ours, 0, height, width, hilo_by_windows)
    for module in (ours, check):
        assert_all_close(outputs_and_gradients_of(module, 0, height, width), expected, tolerance=1e-10)


@pytest.mark.parametrize("size", [(7, 5), (5, 8)])
def test_linformer_raises_for_another_map_size(size):
    with pytest.raises(ConfigError, match=f"5 x 7 .* {size[0]} x {size[1]}"):
        attend(build("linformer", 0), *inputs_for(0, *size))
