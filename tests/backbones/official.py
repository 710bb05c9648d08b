"""Names and shapes of the official ViL checkpoints."""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.golden import golden_values

WINDOW = 7


@dataclasses.dataclass(frozen=True)
class OfficialStage:
    """A stage: depth, patch size, heads, channels and global tokens. ``full`` means official full attention (s0).

    ``features`` of a Performer and ``reduction`` of spatial reduction are 0 for sliding chunks.
    """

    depth: int
    patch: int
    heads: int
    dim: int
    globals: int = 1
    full: bool = False
    features: int = 0
    reduction: int = 0


# vil_tiny_1_1_3_1
TINY = (OfficialStage(1, 4, 1, 48), OfficialStage(1, 2, 3, 96), OfficialStage(3, 2, 3, 192))
TINY = (*TINY, OfficialStage(1, 2, 6, 384, globals=0))


def official_state_dict(
    stages: tuple[OfficialStage, ...] = TINY,
    *,
    relative_bias: bool,
    img_size: int = 224,
    windows: Sequence[int] = (),
    num_classes: int = 10,
    shared: bool = True,
) -> dict[str, Tensor]:
    """Return a checkpoint in the official format. Each tensor is a random function of its name.

    Args:
        windows: Chunk sizes of the first stages; ``WINDOW`` in the others.
    """
    options = {"relative_bias": relative_bias, "img_size": img_size, "windows": windows, "num_classes": num_classes}
    shapes = official_shapes(stages, **options)
    sources = {name: name.replace("_global.", ".") if shared else name for name in shapes}
    return {name: _values(sources[name], shape).clone() for name, shape in shapes.items()}


def official_shapes(
    stages: tuple[OfficialStage, ...],
    *,
    relative_bias: bool,
    img_size: int = 224,
    windows: Sequence[int] = (),
    num_classes: int = 1000,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint in the official format."""
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
                window = windows[number - 1] if number <= len(windows) else WINDOW
                offsets = 2 * side - 1 if stage.full else 4 * window - 1
                index = (side**2, side**2) if stage.full else (window**2, 9 * window**2)
                shapes[f"{attention}.attn.local_relative_position_bias_table"] = (offsets**2, heads)
                shapes[f"{attention}.attn.relative_position_index"] = index
            if relative_bias and num_global:
                shapes[f"{attention}.attn.g2l_relative_position_bias"] = (2, heads, num_global)
                shapes[f"{attention}.attn.g2g_relative_position_bias"] = (heads, num_global, num_global)
            is_performer, is_reduced = stage.features and not stage.full, stage.reduction and not stage.full
            if is_performer:
                shapes[f"{attention}.attn.fast_attention.projection_matrix"] = (stage.features, dim // heads)
            if is_reduced:
                shapes[f"{attention}.attn.proj_sr.weight"] = (dim, dim, stage.reduction, stage.reduction)
            if stage.full or is_performer:
                layers = {"qkv": 3 * dim, "proj": dim}
            else:
                layers = {"query": dim, "kv": 2 * dim, "proj": dim}
            if not (stage.full or is_performer or is_reduced) and num_global:
                layers |= {f"{layer}_global": size for layer, size in layers.items()}
            for layer, size in layers.items():
                shapes |= _linear(f"{attention}.attn.{layer}", size, dim)
            shapes |= _linear(f"{mlp}.mlp.fc1", 4 * dim, dim) | _linear(f"{mlp}.mlp.fc2", dim, 4 * dim)
        in_channels = dim
    return shapes | {f"norm.{leaf}": (dim,) for leaf in ("weight", "bias")} | _linear("head", num_classes, dim)


def _linear(name: str, size: int, *inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size, *inputs), f"{name}.bias": (size,)}


@functools.cache
def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("relative_position_index"):
        return torch.zeros(shape, dtype=torch.int64)
    return golden_values(name, shape).double()
