"""Linformer (ViL section 3.3 and appendix D): keys and values projected along the sequence to a fixed length."""

import math

import torch
from torch import Tensor, nn

from backbones.attention.dense import BACKENDS, join_tokens, merge_heads, part_tokens, split_heads
from backbones.execution.tracing import is_tracing, static_size
from backbones.utils.errors import InputError, check_choice


class LinformerAttention(nn.Module):
    """Multi-head attention to ``num_features`` learned combinations of the tokens of one map size.

    Keys and values share the combinations, as in the paper's models (the counts of Table 14).

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        map_size: height and width, in tokens, of the only map that it takes.
        num_features: K, the projected length; 256 in the paper.
        num_global_tokens: G; they are projected with the others.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: see :class:`backbones.attention.dense.DenseAttention`.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        map_size: tuple[int, int],
        num_features: int = 256,
        num_global_tokens: int = 1,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, BACKENDS)
        self.num_heads = num_heads
        self.map_size = map_size
        self.backend = backend
        self.update_globals = update_globals and num_global_tokens > 0
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.projection = nn.Linear(dim, dim)
        length, bound = num_global_tokens + math.prod(map_size), num_features**-0.5
        self.project_length = nn.Parameter(torch.empty(length, num_features).uniform_(-bound, bound))

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that are not updated.

        Raises:
            InputError: for a map of another size.
        """
        height, width = tokens.shape[1:3]
        # A traced size is a tensor, and its comparison would be frozen into the graph.
        if not is_tracing() and (height, width) != self.map_size:
            raise InputError(
                f"Linformer is tied to maps of {self.map_size[0]} x {self.map_size[1]} tokens, and this one has "
                f"{height} x {width}: make the model for this image size (create_classifier's img_size)"
            )
        sequence = join_tokens(tokens, global_tokens)
        # (B, K, C) each
        key, value = (self.project_length.T @ self.key_value(sequence)).chunk(2, dim=2)
        num_global = 0 if global_tokens is None else static_size(global_tokens.shape[1])
        query = self.query(sequence if self.update_globals else sequence[:, num_global:])
        query, key, value = (split_heads(x, self.num_heads) for x in (query, key, value))
        output = self.projection(merge_heads(BACKENDS[self.backend](query, key, value)))
        return part_tokens(output, height, width, num_global if self.update_globals else 0)
