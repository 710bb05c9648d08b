"""What kernels over chunks of a map share: cutting it, and keys that are there but must not be seen.

A mask for every pair would be larger than all keys. A key that must not be seen is marked in extra channels instead, so
that the product with the query lowers its score by a penalty. The product is split in two factors, both of which
float16 can hold where its penalty is taken: with heads of up to 1024 channels more than the largest float16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.tracing import first, in_order, missing

_PENALTY = 1e9
_QUERY_MARK, _KEY_MARK_FLOAT16 = 256.0, -32768.0


def mark_channels(channels: int, device: torch.device) -> int:
    """How many channels mark hidden keys: one; on a GPU, where the fast kernels want it, up to a multiple of 8."""
    return 8 - channels % 8 if device.type == "cuda" else 1


def mark_queries(query: Tensor, extra: int) -> Tensor:
    """(..., D) -> (..., D + extra), to be taken with the keys of :func:`mark_keys`."""
    return F.pad(query, (0, extra), value=_QUERY_MARK)


def mark_keys(key: Tensor, hidden: Tensor, *, extra: int, scale: float) -> Tensor:
    """Keys with ``extra`` channels more, negative where a place is hidden, and 0 elsewhere.

    Args:
        key: (B, M, H, W, D).
        hidden: (H, W), True for a place that must not be seen.
        scale: of the products.

    Returns:
        (B, M, H, W, D + extra)
    """
    half = _computing_dtype(key) == torch.float16
    marks = hidden.to(key.dtype) * (_KEY_MARK_FLOAT16 if half else -_PENALTY / (_QUERY_MARK * scale * extra))
    return torch.cat([key, marks[:, :, None].expand(*key.shape[:2], -1, -1, extra)], dim=-1)


def _computing_dtype(x: Tensor) -> torch.dtype:
    """The type that attention on ``x`` is computed in: autocast changes it."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def to_chunks(x: Tensor, window_size: int) -> Tensor:
    """(B, M, H, W, D) -> (B * rows * M, cols, w * w, D), padded with zeros to whole chunks."""
    height, width = x.shape[2:4]
    x = F.pad(x, (0, 0, 0, missing(width, window_size), 0, missing(height, window_size)))
    # (B, M, rows, cols, D, w, w)
    x = x.unfold(2, window_size, window_size).unfold(3, window_size, window_size)
    return in_order(x.permute(0, 2, 1, 3, 5, 6, 4)).flatten(4, 5).flatten(0, 2)


def from_chunks(x: Tensor, window_size: int, *, batch: int, heads: int, height: int, width: int) -> Tensor:
    """(B * rows * M, cols, w * w, D) -> (B, M, H, W, D), without the padding."""
    rows = (height + window_size - 1) // window_size
    # (B, rows, M, cols, w, w, D) -> (B, M, rows * w, cols * w, D)
    x = x.unflatten(2, (window_size, window_size)).unflatten(0, (batch, rows, heads))
    x = in_order(x.permute(0, 2, 1, 4, 3, 5, 6)).flatten(4, 5).flatten(2, 3)
    return first(first(x, 2, height), 3, width)


def bias_of_chunks(bias: Tensor, chunks: Tensor, heads: int) -> Tensor:
    """(M or 1, w * w, S) -> (B * rows * M, 1, w * w, S), as the ``chunks`` of :func:`to_chunks` have their heads."""
    return in_order(bias.expand(chunks.shape[0] // heads, heads, -1, -1)).flatten(0, 1)[:, None]
