"""What kernels over chunks of a map share: cutting it, and keys that are there but must not be seen.

A mask for every pair would be larger than all keys. A key that must not be seen is marked in extra channels instead, so
that the product with the query lowers its score by a penalty. The product is split in two factors, both of which
float16 can hold where its penalty is taken: with heads of up to 1024 channels more than the largest float16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.execution.tracing import first, in_order, missing

MODES = ("zero_pad", "exact", "cyclic")
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
    marks = hidden.to(key.dtype) * mark_of_keys(key, extra=extra, scale=scale)
    return torch.cat([key, marks[:, :, None].expand(*key.shape[:2], -1, -1, extra)], dim=-1)


def mark_of_keys(key: Tensor, *, extra: int, scale: float) -> float:
    """What the extra channels of a hidden key hold: see :func:`mark_keys`."""
    half = _computing_dtype(key) == torch.float16
    return _KEY_MARK_FLOAT16 if half else -_PENALTY / (_QUERY_MARK * scale * extra)


def _computing_dtype(x: Tensor) -> torch.dtype:
    """The type that attention on ``x`` is computed in: autocast changes it."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def with_halo(
    key: Tensor, value: Tensor, window_size: int, mode: str, *, extra: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Pad keys and values to whole chunks, put one chunk more on every side, and mark what must not be seen.

    Returns:
        Two (B, M, (rows + 2) * w, (cols + 2) * w, D + extra); the last channels of the keys are negative for a place
        that holds no token, or one that is seen elsewhere, and 0 for a token.
    """
    height, width = key.shape[2:4]
    pad_height, pad_width = missing(height, window_size), missing(width, window_size)
    if mode == "cyclic":
        whole = (0, 0, 0, pad_width, 0, pad_height)
        rows, hidden_rows = wrap(height, height + pad_height, window_size, key.device)
        cols, hidden_cols = wrap(width, width + pad_width, window_size, key.device)
        hidden = hidden_rows[:, None] | hidden_cols[None, :]
        key, value = (F.pad(x, whole).index_select(2, rows).index_select(3, cols) for x in (key, value))
        value = F.pad(value, (0, extra))
    else:
        halo = (window_size, window_size + pad_width, window_size, window_size + pad_height)
        hidden = is_padding(key, (height, width), halo)
        key, value = F.pad(key, (0, 0, *halo)), F.pad(value, (0, extra, *halo))
    return mark_keys(key, hidden, extra=extra, scale=scale), value


def is_padding(x: Tensor, shape: tuple[int, ...], pad: tuple[int, ...]) -> Tensor:
    """Which places of a map of ``shape`` that gets ``pad`` (as ``F.pad``) are padding, bool; on the device of ``x``."""
    # As numbers: TensorRT pads no booleans.
    return F.pad(x.new_zeros(()).expand(shape), pad, value=1.0).bool()


def wrap(size: int, padded: int, window_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source of each place along an axis with its cyclic halo, and whether the place must not be seen."""
    place = torch.arange(-window_size, padded + window_size, device=device)
    # The padded size as a tensor: it is compared, and in an exported model it follows the image.
    whole = place[-1:] + 1 - window_size
    source = place % whole
    # With fewer than three chunks the chunk behind the border is a neighbour already.
    return source, (source >= size) | ((place != source) & (whole < 3 * window_size))


def to_chunks(x: Tensor, window_size: int) -> Tensor:
    """(B, M, H, W, D) -> (B * rows * M, cols, w * w, D), padded with zeros to whole chunks."""
    height, width = x.shape[2:4]
    x = F.pad(x, (0, 0, 0, missing(width, window_size), 0, missing(height, window_size)))
    # (B, M, rows, w, cols, w, D)
    x = x.unflatten(3, (-1, window_size)).unflatten(2, (-1, window_size))
    return in_order(x.permute(0, 2, 1, 4, 3, 5, 6)).flatten(4, 5).flatten(0, 2)


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


def own_and_neighbour(local_bias: Tensor, window_size: int, shift: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of a local bias, (M, w * w, 9 * w * w), the keys of the own chunk and of the one at ``shift``.

    Returns:
        Two views, (M, w * w, w, w).
    """
    chunks = local_bias.unflatten(2, (3, window_size, 3, window_size))
    return tuple(chunks[:, :, 1 + row, :, 1 + col] for row, col in ((0, 0), shift))


def near_only(query: Tensor, window_size: int, local_bias: Tensor | None) -> Tensor:
    """A local bias that hides what is further than w from a place: (M or 1, w * w, 9 * w * w)."""
    places = window_size**2
    if local_bias is None:
        local_bias = query.new_zeros(1, places, 9 * places)
    inside = torch.arange(window_size, device=query.device) + window_size
    around = torch.arange(3 * window_size, device=query.device)
    near = (inside[:, None] - around[None, :]).abs() <= window_size
    seen = (near[:, None, :, None] & near[None, :, None, :]).reshape(places, 9 * places)
    return local_bias.masked_fill(~seen, float("-inf"))
