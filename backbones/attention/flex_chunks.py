"""Vision Longformer attention (ViL section 3.2) as one call of PyTorch's FlexAttention, for CUDA devices.

The tokens are taken chunk by chunk, so that a block of queries sees few blocks of keys, and the others are skipped.
Nothing is padded or copied per window. :mod:`torch.nn.attention.flex_attention` is imported where it first runs: that
takes a quarter of a second.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.attention.chunks import MODES, WindowInputs, both_biases
from backbones.errors import check_choice
from backbones.layers.tracing import in_autocast_dtype

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Side of a block of scores, PyTorch's default.
_BLOCK = 128


def flex_chunk_attention(
    *, chunk_size: int, mode: str = "zero_pad", shift: tuple[int, int] | None = None, **tensors: Tensor | None
) -> Tensor:
    """The contract of :func:`backbones.attention.sliding_chunk.sliding_chunk_attention`.

    On a GPU ``torch.compile`` compiles the kernels, for each number of heads, channels and global tokens; where that
    fails, its error is raised. On a CPU all N x N scores are in memory, which is for tests, and PyTorch refuses inputs
    that need a gradient. The tests compare outputs with the reference on a CPU, and gradients where that refusal is
    lifted; no kernel of a GPU has run.

    Raises:
        ConfigError: for an unknown mode.
    """
    check_choice("attention mode", mode, MODES)
    inputs = WindowInputs(**tensors)
    query, key, value, global_key, global_value = in_autocast_dtype(*inputs[:5])
    size, num_global = tuple(query.shape[2:4]), 0 if global_key is None else global_key.shape[2]
    plan = plan_chunks(size, num_global, chunk_size, mode, shift, query.device)
    query, key, value = (x.flatten(2, 3)[:, :, plan.order] for x in (query, key, value))
    if global_key is not None:
        key, value = torch.cat([global_key, key], dim=2), torch.cat([global_value, value], dim=2)
    score_mod = None
    if inputs.local_bias is not None or inputs.global_bias is not None:
        bias, bias_index = _joint_bias(inputs, chunk_size), plan.bias_index

        def score_mod(score: Tensor, image: Tensor, head: Tensor, query_number: Tensor, key_number: Tensor) -> Tensor:
            position, slot = bias_index(query_number, key_number)
            return score + bias[head, position, slot]

    output = _kernel(query.device.type)(query, key, value, score_mod=score_mod, block_mask=plan.block_mask)
    return output[:, :, plan.order.argsort()].unflatten(2, size)


@functools.cache
def _kernel(device_type: str) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, fullgraph=True)


def _joint_bias(inputs: WindowInputs, chunk_size: int) -> Tensor:
    """Both biases side by side, (M, w * w, 9 * w * w + G): zeros for the one that is not there."""
    heads, (local, to_global) = inputs.query.shape[1], both_biases(inputs, chunk_size)
    parts = local, to_global[:, None].expand(-1, chunk_size**2, -1)
    return torch.cat([part.expand(heads, -1, -1) for part in parts], dim=2)


class ChunkPlan(NamedTuple):
    """Which tokens of a map see each other, for G global tokens and the N of the map, chunk by chunk.

    Attributes:
        order: (N,), the tokens of the map in the order of their chunks.
        block_mask: which of the G + N keys each of the N queries sees.
        bias_index: for the numbers of a query and a key the indices into :func:`_joint_bias`.
    """

    order: Tensor
    block_mask: "BlockMask"
    bias_index: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def plan_chunks(
    size: tuple[int, int], num_global: int, chunk_size: int, mode: str, shift: tuple | None, device: torch.device
) -> ChunkPlan:
    """Return the :class:`ChunkPlan` of a map of ``size``, height and width; the last 64 are kept."""
    from torch.nn.attention.flex_attention import BlockMask

    chunks = [-(-length // chunk_size) for length in size]
    # Distances are modulo these: a chunk that is not there keeps both borders apart, but for cyclic windows.
    periods = [chunk_size * (number + (mode != "cyclic" or number < 3)) for number in chunks]
    tokens = torch.cartesian_prod(*(torch.arange(length, device=device) for length in size)).T
    number, order = (tokens[0] // chunk_size * chunks[1] + tokens[1] // chunk_size).sort(stable=True)
    rows, cols = F.pad(tokens[:, order], (num_global, 0)).int()
    # In a tensor, since kernels are compiled for each value of a number.
    step = None if shift is None else torch.tensor(shift, device=device)

    def places(query: Tensor, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Along each axis: the query's place in its chunk, and the key's in the query's three if below 3w."""
        own = [at[query + num_global] % chunk_size for at in (rows, cols)]
        axes = zip((rows, cols), own, periods, strict=True)
        return [(x, (at[key] - at[query + num_global] + x + chunk_size) % period) for at, x, period in axes]

    def sees_chunk(query: Tensor, key: Tensor) -> Tensor:
        down, right = (place // chunk_size - 1 for _, place in places(query, key))
        if step is None:
            return (down <= 1) & (right <= 1)
        return (down == 0) & (right == 0) | (down == step[0]) & (right == step[1])

    def sees(image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = sees_chunk(query, key)
        if mode == "exact":
            for own, place in places(query, key):
                seen = seen & ((place - own - chunk_size).abs() <= chunk_size)
        return (key < num_global) | seen

    def bias_index(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        (own_row, row), (own_col, col) = places(query, key)
        # Keys that are not seen have an index too.
        slot = row.clamp(max=3 * chunk_size - 1) * 3 * chunk_size + col.clamp(max=3 * chunk_size - 1)
        return own_row * chunk_size + own_col, torch.where(key < num_global, 9 * chunk_size**2 + key, slot)

    # PyTorch's create_block_mask would hold all N x N pairs; here chunks stand for their tokens.
    first = torch.searchsorted(number, torch.arange(chunks[0] * chunks[1], device=device))
    near, members = sees_chunk(first[:, None], first + num_global).float(), []
    for before in (0, num_global):
        members.append(near.new_zeros(-(-(before + len(order)) // _BLOCK), len(near)))
        members[-1][(torch.arange(len(order), device=device) + before) // _BLOCK, number] = 1
    blocks = members[0] @ near @ members[1].T > 0
    blocks[:, : -(-num_global // _BLOCK)] = True
    counts, indices = blocks.sum(dim=1).int(), blocks.int().argsort(dim=1, descending=True, stable=True).int()
    lengths = (len(order), num_global + len(order))
    block_mask = BlockMask.from_kv_blocks(
        counts[None, None], indices[None, None], BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=lengths
    )
    return ChunkPlan(order, block_mask, bias_index)
