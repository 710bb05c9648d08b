"""HiLo attention of LITv2: some heads attend within windows, the others to the mean of each window.

Shapes: B images, M heads, H x W tokens of a feature map, D channels per head, windows of s x s tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.chunks import attend_chunks, to_chunks
from backbones.attention.dense import dense_attention, merge_heads, pytorch_attention, split_heads, traced_keys
from backbones.layers.block import pad_to_multiple
from backbones.layers.tracing import contiguous_for_export, is_tracing, take_first


def window_attention(query: Tensor, key: Tensor, value: Tensor, *, window_size: int) -> Tensor:
    """Return attention in which each token attends to the tokens of its window.

    Args:
        query: (B, M, H, W, D). ``window_size`` divides H and W.
        key: (B, M, H, W, D).
        value: (B, M, H, W, D).
        window_size: Side s of a window.

    Returns:
        (B, M, H, W, D)
    """
    keys, values = (to_chunks(x, window_size) for x in (key, value))
    return attend_chunks(pytorch_attention, query, keys, values, None, window_size)


BACKENDS = {"sdpa": (window_attention, dense_attention), "reference": (reference.window_attention, reference.attention)}


class HiLoAttention(nn.Module):
    """Multi-head attention without positions, with one group of heads for high and one for low frequencies.

    Heads of the first group (Hi-Fi) attend within windows. Heads of the second group (Lo-Fi) attend to the whole
    feature map, averaged over each window.

    A feature map is padded with zeros at the bottom and on the right to whole windows. As in the official code, the
    padding is not masked: zeros take part in the averages, and the keys and values of Hi-Fi are the biases there. The
    official detectors with windows of 4 are trained like this, since their feature maps are often 50 tokens high.

    Args:
        dim: Channels of a token.
        num_heads: Number of heads of both groups. It divides ``dim``.
        window_size: Side s of a window.
        alpha: Fraction of the heads in the second group.
        backend: ``"sdpa"``, or ``"reference"`` for debugging.
    """

    num_global_tokens = 0
    update_globals = False

    def __init__(
        self, dim: int, *, num_heads: int, window_size: int, alpha: float = 0.9, backend: str = "sdpa"
    ) -> None:
        super().__init__()
        self.window_size, self.backend = window_size, backend
        self.low_heads = int(alpha * num_heads)
        self.high_heads = num_heads - self.low_heads
        low_dim, high_dim = (heads * (dim // num_heads) for heads in (self.low_heads, self.high_heads))
        self.high_qkv = nn.Linear(dim, 3 * high_dim)
        self.high_proj = nn.Linear(high_dim, high_dim)
        self.query = nn.Linear(dim, low_dim)
        self.key_value = nn.Linear(dim, 2 * low_dim)
        self.proj = nn.Linear(low_dim, low_dim)

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the updated tokens (B, H * W, C). ``size`` is H and W."""
        attend_windows, attend_all = BACKENDS[self.backend]
        padded = contiguous_for_export(tokens.unflatten(1, size).permute(0, 3, 1, 2))
        padded = pad_to_multiple(padded, self.window_size)
        # (B, M, H', W', D) with the height and width of the padded feature map
        qkv = split_heads(self.high_qkv(padded.permute(0, 2, 3, 1)), 3 * self.high_heads).chunk(3, dim=1)
        high = attend_windows(*qkv, window_size=self.window_size)
        high = merge_heads(take_first(take_first(high, 2, size[0]), 3, size[1])).flatten(1, 2)
        # (B, C, H' / s, W' / s)
        means = F.avg_pool2d(padded, self.window_size)
        key_value = self.key_value(contiguous_for_export(means.flatten(2).transpose(1, 2)))
        key, value = split_heads(key_value, 2 * self.low_heads).chunk(2, dim=1)
        if is_tracing():
            key, value, _ = traced_keys(key, value, *means.shape[2:], 0)
        low = attend_all(contiguous_for_export(split_heads(self.query(tokens), self.low_heads)), key, value)
        return torch.cat([self.high_proj(high), self.proj(merge_heads(low))], dim=2)
