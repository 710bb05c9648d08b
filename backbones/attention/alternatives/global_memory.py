"""Pure global memory (ViL section 3.3 and appendix D): ViL without its window, and with many global tokens."""

import torch
from torch import Tensor, nn

from backbones.attention.dense import BACKENDS, merge_heads, split_heads
from backbones.utils.errors import InputError, check_choice


class GlobalMemoryAttention(nn.Module):
    """Multi-head attention of local tokens to the global tokens alone, and of these to all.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        num_global_tokens: 1 or more; the paper has 256, 256, 64 and 16 in its four stages (Table 15).
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: see :class:`backbones.attention.dense.DenseAttention`.

    Raises:
        InputError: where there is no global token to look at.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_global_tokens: int,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, BACKENDS)
        if num_global_tokens < 1:
            raise InputError("global attention needs at least one global token")
        self.num_heads = num_heads
        self.backend = backend
        self.shared_projections = True
        self.update_globals = update_globals
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.projection = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, global_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) -> the same; None for global tokens that are not updated."""
        attend = BACKENDS[self.backend]
        sequence = tokens.flatten(1, 2)
        key, value = split_heads(self.key_value(global_tokens), 2 * self.num_heads).chunk(2, dim=1)
        output = merge_heads(attend(split_heads(self.query(sequence), self.num_heads), key, value))
        output = self.projection(output).unflatten(1, tokens.shape[1:3])
        if not self.update_globals:
            return output, None
        local_key, local_value = split_heads(self.key_value(sequence), 2 * self.num_heads).chunk(2, dim=1)
        query = split_heads(self.query(global_tokens), self.num_heads)
        update = attend(query, torch.cat([key, local_key], dim=2), torch.cat([value, local_value], dim=2))
        return output, self.projection(merge_heads(update))
