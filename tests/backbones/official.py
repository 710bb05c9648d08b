"""ViL from its papers' equations and the official parameter names, independent of the package's code.

Written for small maps (at most two chunks per side), on which ViL attention is full attention.
"""

import dataclasses
import functools
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 7


@dataclasses.dataclass(frozen=True)
class OfficialStage:
    """Depth, patch size, heads, channels and global tokens; ``full`` for the official full attention (s0)."""

    depth: int
    patch: int
    heads: int
    dim: int
    globals: int = 1
    full: bool = False


# vil_tiny_1_1_3_1
TINY = (OfficialStage(1, 4, 1, 48), OfficialStage(1, 2, 3, 96), OfficialStage(3, 2, 3, 192))
TINY = (*TINY, OfficialStage(1, 2, 6, 384, globals=0))


def official_state_dict(
    stages: tuple[OfficialStage, ...] = TINY,
    *,
    relative_bias: bool,
    img_size: int = 224,
    num_classes: int = 10,
    shared: bool = True,
) -> dict[str, Tensor]:
    """A checkpoint in the official format, each tensor a random function of its name."""
    shapes, in_channels, side = {}, 3, img_size
    for number, stage in enumerate(stages, start=1):
        dim, heads, num_global = stage.dim, stage.heads, stage.globals
        side = -(-side // stage.patch)
        embed = f"layer{number}.0"
        if num_global:
            shapes[f"{embed}.cls_token"] = (1, num_global, dim)
        if not relative_bias:
            # The official code has an empty table where there is no global token.
            shapes[f"{embed}.cls_pos_embed"] = (1, num_global, dim)
            shapes |= {f"{embed}.{axis}_pos_embed": (1, side, dim // 2) for axis in "xy"}
        shapes |= _linear(f"{embed}.proj", dim, in_channels, stage.patch, stage.patch)
        shapes |= {f"{embed}.norm_embed.{leaf}": (dim,) for leaf in ("weight", "bias")}
        for index in range(stage.depth):
            attention, mlp = f"layer{number}.{2 * index + 1}", f"layer{number}.{2 * index + 2}"
            shapes |= {f"{part}.norm.{leaf}": (dim,) for part in (attention, mlp) for leaf in ("weight", "bias")}
            if relative_bias:
                # Full attention has a bias for each offset in its map.
                offsets = 2 * side - 1 if stage.full else 4 * WINDOW - 1
                index = (side**2, side**2) if stage.full else (WINDOW**2, 9 * WINDOW**2)
                shapes[f"{attention}.attn.local_relative_position_bias_table"] = (offsets**2, heads)
                shapes[f"{attention}.attn.relative_position_index"] = index
            if relative_bias and num_global:
                shapes[f"{attention}.attn.g2l_relative_position_bias"] = (2, heads, num_global)
                shapes[f"{attention}.attn.g2g_relative_position_bias"] = (heads, num_global, num_global)
            if stage.full:
                layers = {"qkv": 3 * dim, "proj": dim}
            else:
                layers = {"query": dim, "kv": 2 * dim, "proj": dim}
            if not stage.full and num_global:
                layers |= {f"{layer}_global": size for layer, size in layers.items()}
            for layer, size in layers.items():
                shapes |= _linear(f"{attention}.attn.{layer}", size, dim)
            shapes |= _linear(f"{mlp}.mlp.fc1", 4 * dim, dim) | _linear(f"{mlp}.mlp.fc2", dim, 4 * dim)
        in_channels = dim
    shapes |= {"norm.weight": (in_channels,), "norm.bias": (in_channels,)} | _linear("head", num_classes, in_channels)
    return {name: _random(name.replace("_global.", ".") if shared else name, shape) for name, shape in shapes.items()}


def _linear(name: str, size: int, *inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size, *inputs), f"{name}.bias": (size,)}


@functools.cache
def _normal(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape))


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("relative_position_index"):
        return torch.zeros(shape, dtype=torch.int64)
    values = _normal(name, shape).clone()
    if name.endswith("weight") and len(shape) > 1:
        return values / np.prod(shape[1:]) ** 0.5
    return 0.3 * values + (1 if name.endswith(("norm.weight", "norm_embed.weight")) else 0)


def official_forward(
    weights: dict[str, Tensor], images: Tensor, stages: tuple[OfficialStage, ...] = TINY
) -> tuple[dict[str, Tensor], Tensor]:
    """The maps and the logits (equations 1 to 3; the average-pooled head), for images of at most 56 pixels a side."""
    features, x, no_tokens = {}, images, images.new_zeros(len(images), 0, 1)
    for number, stage in enumerate(stages, start=1):
        embed = f"layer{number}.0"
        x = F.pad(x, (0, -x.shape[3] % stage.patch, 0, -x.shape[2] % stage.patch))
        x = F.conv2d(x, weights[f"{embed}.proj.weight"], weights[f"{embed}.proj.bias"], stride=stage.patch)
        height, width = x.shape[2:]
        assert max(height, width) <= 2 * WINDOW
        x = _norm(weights, f"{embed}.norm_embed", x.permute(0, 2, 3, 1))
        tokens = no_tokens.expand(-1, -1, stage.dim)
        if stage.globals:
            tokens = weights[f"{embed}.cls_token"].expand(len(images), -1, -1)
        if f"{embed}.x_pos_embed" in weights:
            down, right = weights[f"{embed}.x_pos_embed"][0, :height], weights[f"{embed}.y_pos_embed"][0, :width]
            x = x + torch.cat([down[:, None].expand(-1, width, -1), right[None].expand(height, -1, -1)], dim=-1)
            tokens = tokens + weights[f"{embed}.cls_pos_embed"]
        sequence = torch.cat([tokens, x.flatten(1, 2)], dim=1)
        for index in range(stage.depth):
            attention, mlp = f"layer{number}.{2 * index + 1}", f"layer{number}.{2 * index + 2}"
            normed = _norm(weights, f"{attention}.norm", sequence)
            sequence = sequence + _attention(weights, f"{attention}.attn", normed, stage, height, width)
            hidden = F.gelu(_apply(weights, f"{mlp}.mlp.fc1", _norm(weights, f"{mlp}.norm", sequence)))
            sequence = sequence + _apply(weights, f"{mlp}.mlp.fc2", hidden)
        x = sequence[:, stage.globals :].unflatten(1, (height, width)).permute(0, 3, 1, 2)
        features[f"stage{number}"] = x
    return features, _apply(weights, "head", _norm(weights, "norm", sequence).mean(dim=1))


def _apply(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6)


def _attention(
    weights: dict[str, Tensor], name: str, sequence: Tensor, stage: OfficialStage, height: int, width: int
) -> Tensor:
    """Every token sees every other; the global tokens, first in the sequence, may have projections of their own."""
    bias = _bias(weights, name, stage.globals, height, width)
    rows = [slice(stage.globals, None)] + ([slice(0, stage.globals)] if stage.globals else [])
    outputs = []
    for suffix, queries in zip(("", "" if stage.full else "_global"), rows, strict=False):
        if stage.full:
            query, key, value = _apply(weights, f"{name}.qkv", sequence).chunk(3, dim=-1)
        else:
            query = _apply(weights, f"{name}.query{suffix}", sequence)
            key, value = _apply(weights, f"{name}.kv{suffix}", sequence).chunk(2, dim=-1)
        query, key, value = (x.unflatten(-1, (stage.heads, -1)).transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + bias
        output = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)[:, queries]
        outputs.insert(0, _apply(weights, f"{name}.proj{suffix}", output))
    return torch.cat(outputs, dim=1)


def _bias(weights: dict[str, Tensor], name: str, num_global: int, height: int, width: int) -> Tensor | float:
    """(M, G + H * W, G + H * W): by offset between local tokens; one value for all local tokens of a global one."""
    table = weights.get(f"{name}.local_relative_position_bias_table")
    if table is None:
        return 0.0
    row, col = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    index = (row[:, None] - row + 2 * WINDOW - 1) * (4 * WINDOW - 1) + col[:, None] - col + 2 * WINDOW - 1
    bias = F.pad(table[index].permute(2, 0, 1), (num_global, 0, num_global, 0))
    if num_global:
        from_global, from_local = weights[f"{name}.g2l_relative_position_bias"]
        bias[:, :num_global, :num_global] = weights[f"{name}.g2g_relative_position_bias"]
        bias[:, :num_global, num_global:] = from_global[:, :, None]
        bias[:, num_global:, :num_global] = from_local[:, None, :]
    return bias
