"""Spatial reduction attention (ViL section 3.3 and appendix D): keys and values from a smaller map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention.dense import BACKENDS, join_tokens, merge_heads, part_tokens, recorded_keys, split_heads
from backbones.execution.precision import at_least_float32
from backbones.execution.tracing import in_order, is_tracing, missing_to, static_size
from backbones.utils.errors import check_choice


class SpatialReductionAttention(nn.Module):
    """Multi-head attention to a map whose places are convolutions over R x R tokens, and to the global tokens.

    As in the official models, the last rows and columns that do not fill a place of the smaller map are not seen; only
    a map below R tokens is padded, with zeros below and on the right.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        reduction: R; 16, 8, 4, 2 in the four stages of SRA/64 and 8, 4, 2, 1 of SRA/32 (Table 15). With 1 there is no
            convolution, as the counts of Table 14 have it, and attention is full.
        num_global_tokens: G; they are not reduced.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: see :class:`backbones.attention.dense.DenseAttention`.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        reduction: int,
        num_global_tokens: int = 1,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, BACKENDS)
        self.num_heads = num_heads
        self.reduction = reduction
        self.backend = backend
        self.update_globals = update_globals and num_global_tokens > 0
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.projection = nn.Linear(dim, dim)
        self.reduce = None
        if reduction > 1:
            self.reduce = nn.Conv2d(dim, dim, kernel_size=reduction, stride=reduction, bias=False)

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that are not updated."""
        height, width = tokens.shape[1:3]
        reduced, size = tokens.flatten(1, 2), (height, width)
        if self.reduce is not None:
            missing = (0, missing_to(width, self.reduction), 0, missing_to(height, self.reduction))
            reduced = in_order(self.reduce(in_order(F.pad(tokens.permute(0, 3, 1, 2), missing))))
            size = reduced.shape[2:]
            # (B, max(1, H // R) * max(1, W // R), C)
            reduced = instance_norm(reduced.flatten(2)).transpose(1, 2)
        if global_tokens is not None:
            reduced = torch.cat([global_tokens, reduced], dim=1)
        key, value = split_heads(self.key_value(reduced), 2 * self.num_heads).chunk(2, dim=1)
        num_global = 0 if global_tokens is None else static_size(global_tokens.shape[1])
        if is_tracing():
            key, value, _ = recorded_keys(key, value, *size, num_global)
        query = self.query(join_tokens(tokens, global_tokens if self.update_globals else None))
        output = BACKENDS[self.backend](in_order(split_heads(query, self.num_heads)), key, value)
        output = self.projection(merge_heads(output))
        return part_tokens(output, height, width, num_global if self.update_globals else 0)


def instance_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """(B, C, N) with mean 0 and variance 1 over N, without learned scale; zeros where N is 1."""
    values = at_least_float32(x)
    centred = values - values.mean(dim=2, keepdim=True)
    return (centred * (centred.square().mean(dim=2, keepdim=True) + eps).rsqrt()).to(x.dtype)
