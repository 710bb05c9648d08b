"""Positions: absolute 2-D tables, relative bias for windows and for whole maps, and their resizing."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.errors import ConfigError
from backbones.layers.parameters import init_trunc_normal_
from backbones.layers.tracing import at_least_float32, contiguous_for_export, is_tracing, take_first

# How a table meets a map of another size: resized once, when a checkpoint is loaded, into one for the largest map, of
# which each map takes its part (ViL); or resized to each map (LIT).
RESIZING = ("once", "per_feature_map")


def position_parameter(*shape: int) -> nn.Parameter:
    """A table of positions, biases or tokens, initialised as in ViL."""
    return nn.Parameter(init_trunc_normal_(torch.empty(shape)))


def resize_table(table: Tensor, size: tuple[int, ...], *, mode: str = "linear") -> Tensor:
    """Resize a table of positions: ViL does it once before training (section 4.3), LIT for each map.

    Args:
        table: (L, C) or (H, W, C).
        size: the new (L,) or (H, W).
        mode: ``"linear"``, bilinear for a table of two axes, or ``"cubic"``.

    Returns:
        (*size, C), in the type of ``table``; half-pixel centres, as ``align_corners=False``.
    """
    # A traced size is a tensor, and its comparison would be frozen into the graph.
    if not is_tracing() and tuple(table.shape[:-1]) == tuple(size):
        return table
    mode = mode if len(size) == 1 else f"bi{mode}"
    channels_first = at_least_float32(table.movedim(-1, 0)[None])
    return F.interpolate(channels_first, size=size, mode=mode, align_corners=False)[0].movedim(0, -1).to(table.dtype)


class AbsolutePositions(nn.Module):
    """The 2-D positions of ViL (section 3.1): a table for rows and one for columns, concatenated over channels.

    Args:
        size: height and width, in tokens, of the map that the tables are made for.
        dim: channels, even.
        num_global_tokens: G; each global token has a position of its own.
        resizing: one of ``RESIZING``: with ``"once"`` a smaller map takes the top-left part, and a larger one is an
            error.
    """

    no_weight_decay_names = ("rows", "cols", "global_tokens")

    def __init__(self, size: tuple[int, int], dim: int, *, num_global_tokens: int, resizing: str = "once") -> None:
        super().__init__()
        self.resizing = resizing
        self.rows = position_parameter(size[0], dim // 2)
        self.cols = position_parameter(size[1], dim // 2)
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None

    def forward(self, height: int, width: int) -> Tensor:
        """The positions of a map, (height, width, C)."""
        if self.resizing == "per_feature_map":
            rows, cols = resize_table(self.rows, (height,)), resize_table(self.cols, (width,))
        else:
            _check_size((height, width), (self.rows.shape[0], self.cols.shape[0]))
            rows, cols = take_first(self.rows, 0, height), take_first(self.cols, 0, width)
        return torch.cat([rows[:, None].expand(-1, width, -1), cols[None].expand(height, -1, -1)], dim=-1)


def _check_size(size: tuple[int, int], largest: tuple[int, int]) -> None:
    # A traced size is a tensor, and its comparison would be frozen into the graph.
    if not is_tracing() and (size[0] > largest[0] or size[1] > largest[1]):
        raise ConfigError(
            f"a map of {size[0]} x {size[1]} tokens does not fit the position table of {largest[0]} x {largest[1]}; "
            "raise max_img_size (a detector's MODEL.TRANSFORMER.MAX_IMG_SIZE, a classifier's img_size) to the largest "
            "image side"
        )


class _OffsetBias(nn.Module):
    """A learned bias for each head and offset between a query and the keys of its window.

    Args:
        side, window_side: side of the square of queries, and of that of the keys around them.
        stride: rows of the table from one offset of rows to the next.
        num_heads: M.
    """

    no_weight_decay_names = ("table",)

    def __init__(self, side: int, window_side: int, *, stride: int, num_heads: int) -> None:
        super().__init__()
        self.window_side, self.num_offsets, self.stride = window_side, side + window_side - 1, stride
        self.table = position_parameter((self.num_offsets - 1) * (stride + 1) + 1, num_heads)

    def forward(self) -> Tensor:
        """(M, side^2, window_side^2): positions of queries by positions of keys, both row by row."""
        # Not by an index, whose gradient sorts: the keys of a query are a square of the offsets, from the last key on.
        offsets = self.table.T.unfold(1, self.num_offsets, self.stride)
        squares = F.unfold(offsets[None], self.window_side)[0].unflatten(0, (-1, self.window_side**2))
        return squares.flip(1).transpose(1, 2).contiguous()


class WindowRelativeBias(_OffsetBias):
    """A learned bias for each offset between a query and the keys of its 3w x 3w neighbourhood, for each head.

    The table is laid out as in the official ViL code: the row of offset (dh, dw), query minus key, is
    ``(dh + 2w - 1) * (4w - 1) + dw + 2w - 1``.
    """

    resize_mode = "linear"

    def __init__(self, chunk_size: int, num_heads: int) -> None:
        side = 4 * chunk_size - 1
        super().__init__(chunk_size, 3 * chunk_size, stride=side, num_heads=num_heads)
        self.offsets = (side, side)


class SegmentRelativeBias(_OffsetBias):
    """A learned bias between a query and the keys of the window around its segment, for each head (Transformer-LS).

    The table and its index are those of the official code, whose rows are one too close: with side = max(w // 2, 1)
    tokens around the segment, the row of offset (dh, dw), query minus key, is
    ``(dh + side + w - 1) * (w + 2 * side) + dw + side + w - 1``, while dw has 2 * (w + side) - 1 values. So offsets
    ``(dh, dw)`` and ``(dh + 1, dw - w - 2 * side)`` share a bias. Official weights were trained this way, and need it.
    """

    def __init__(self, chunk_size: int, num_heads: int) -> None:
        length = chunk_size + 2 * max(chunk_size // 2, 1)
        super().__init__(chunk_size, length, stride=length, num_heads=num_heads)


class GridPositions(nn.Module):
    """Absolute positions of a whole map, as LIT-Ti has them.

    Args:
        size: height and width, in tokens, of the map that the table is made for.
        dim: channels.
        num_global_tokens: G; each global token has a position of its own.
        resizing: one of ``RESIZING``: with ``"per_feature_map"`` the table is resized bilinearly to each feature map;
            with ``"once"`` a smaller feature map takes the top-left part, and a larger one is an error.
    """

    no_weight_decay_names = ("table", "global_tokens")

    def __init__(
        self, size: tuple[int, int], dim: int, *, num_global_tokens: int = 0, resizing: str = "per_feature_map"
    ) -> None:
        super().__init__()
        self.resizing = resizing
        self.table = position_parameter(*size, dim)
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None

    def forward(self, height: int, width: int) -> Tensor:
        """The positions of a map, (height, width, C)."""
        if self.resizing == "per_feature_map":
            return resize_table(self.table, (height, width))
        _check_size((height, width), self.table.shape[:2])
        return take_first(take_first(self.table, 0, height), 1, width)


class GridRelativeBias(nn.Module):
    """A learned bias for each offset between two tokens of one map, and between them and the global tokens.

    Args:
        size: height and width, in tokens, of the map that the table is made for.
        num_heads: M.
        num_global_tokens: G.
        global_queries: whether the global tokens are queries too.
        resize_mode: see :func:`resize_table`.
        resizing: one of ``RESIZING``: with ``"once"`` a smaller map takes the offsets that it has, and a larger one
            is an error.
    """

    no_weight_decay_names = ("table", "local_to_global", "global_to_local", "global_to_global")
    sized = ("size",)

    def __init__(
        self,
        size: tuple[int, int],
        num_heads: int,
        *,
        num_global_tokens: int = 0,
        global_queries: bool = False,
        resize_mode: str = "linear",
        resizing: str = "per_feature_map",
    ) -> None:
        super().__init__()
        self.size = size
        self.resizing = resizing
        self.num_global_tokens = num_global_tokens
        self.global_queries = global_queries and num_global_tokens > 0
        self.resize_mode = resize_mode
        self.table = position_parameter(math.prod(self.offsets), num_heads)
        if num_global_tokens:
            self.local_to_global = position_parameter(num_heads, num_global_tokens)
        if self.global_queries:
            self.global_to_local = position_parameter(num_heads, num_global_tokens)
            self.global_to_global = position_parameter(num_heads, num_global_tokens, num_global_tokens)

    @property
    def offsets(self) -> tuple[int, int]:
        """How many offsets there are along the height and the width of the table's map."""
        return 2 * self.size[0] - 1, 2 * self.size[1] - 1

    def by_offset(self, height: int, width: int) -> Tensor:
        """The bias by offset of rows and of columns, query minus key: (M, 2 * height - 1, 2 * width - 1).

        All that depends on the size of the map.
        """
        grid = self.table.unflatten(0, self.offsets)
        if self.resizing == "per_feature_map":
            grid = resize_table(grid, (2 * height - 1, 2 * width - 1), mode=self.resize_mode)
        else:
            _check_size((height, width), self.size)
            rows, cols = self.size
            grid = grid[rows - height : rows + height - 1, cols - width : cols + width - 1]
        return grid.movedim(-1, 0)

    def by_row_offset(self, height: int, width: int) -> Tensor:
        """The bias of a pair of columns for each offset of rows, (M, 2 * height - 1, width, width): query by key."""
        grid = self.by_offset(height, width)
        col = torch.arange(width, device=grid.device)
        offset = col[:, None] - col[None, :] + width - 1
        return grid.index_select(2, offset.flatten()).unflatten(2, (width, width))

    def row_group_biases(self, offset_bias: Tensor, rows: Tensor, key_rows: Tensor) -> Iterator[Tensor]:
        """The bias of the queries in some rows of the map, group by group: one copy each, whose gradient is slow.

        Args:
            offset_bias: result of :meth:`by_row_offset`.
            rows: (groups, R), numbers of rows of queries.
            key_rows: (S,), those of keys.

        Yields:
            (M, R * W, G + S * W)
        """
        (heads, offsets, width), num_rows, num_key_rows = offset_bias.shape[:3], rows.shape[1], key_rows.shape[0]
        col = torch.arange(width, device=rows.device)
        # (groups, R, W, S)
        offset = rows[:, :, None, None] - key_rows + offsets // 2 + col[:, None] * offsets
        bias_by_query_col = contiguous_for_export(offset_bias.transpose(1, 2)).flatten(1, 2)
        for index in offset.flatten(1).unbind():
            bias = bias_by_query_col.index_select(1, index)
            yield self._with_globals(bias.view(heads, num_rows * width, num_key_rows * width))

    def _with_globals(self, bias: Tensor) -> Tensor:
        if not self.num_global_tokens:
            return bias
        return torch.cat([self.local_to_global[:, None].expand(-1, bias.shape[1], -1), bias], dim=2)

    @property
    def global_key_bias(self) -> Tensor | None:
        """The bias of local queries at the global keys, (M, G), or None without global tokens."""
        return self.local_to_global if self.num_global_tokens else None

    def global_query_bias(self, tokens: int) -> Tensor:
        """The bias of the global queries, (M, G, G + tokens)."""
        to_local = self.global_to_local[:, :, None].expand(-1, -1, tokens)
        return torch.cat([self.global_to_global, to_local], dim=2)

    def forward(self, height: int, width: int) -> Tensor:
        """The bias of a map of ``height`` x ``width``: (M, L, G + H * W), L the local or all queries, globals first."""
        rows = torch.arange(height, device=self.table.device)
        offset_bias = self.by_row_offset(height, width)
        if torch.is_grad_enabled():
            # (M, H, H, W, W): a second copy, and a gradient that is faster than that of the groups
            bias = offset_bias.index_select(1, (rows[:, None] - rows + height - 1).flatten()).unflatten(1, (-1, height))
            bias = self._with_globals(bias.transpose(2, 3).flatten(3, 4).flatten(1, 2))
        else:
            [bias] = self.row_group_biases(offset_bias, rows[None], rows)
        if self.global_queries:
            bias = torch.cat([self.global_query_bias(bias.shape[1]), bias], dim=1)
        return bias


def fit_table(tensor: Tensor, owner: nn.Module, leaf: str, *, made_for: tuple[int, int] | None = None) -> Tensor:
    """A table of positions of another size, resized for the module that is to have it.

    Args:
        tensor: table of a checkpoint.
        owner: the module of this model.
        leaf: the name of the parameter in ``owner``.
        made_for: height and width, in tokens, of the feature map that ``tensor`` of a :class:`GridRelativeBias` is for;
            None where that is unknown, which is then taken as square.

    Returns:
        ``tensor`` in the size of ``owner``'s parameter; unchanged where that is not such a table or cannot be resized:
        offsets share rows of a segment's table, so that it is not a grid.
    """
    table = getattr(owner, leaf, None)
    # A bias for 2 x 14 tokens has as many rows as one for 14 x 2.
    if not isinstance(table, Tensor) or (tensor.shape == table.shape and made_for is None):
        return tensor
    if tensor.ndim != table.ndim or tensor.shape[-1] != table.shape[-1] or not tensor.numel():
        return tensor
    if isinstance(owner, AbsolutePositions | GridPositions) and leaf != "global_tokens":
        return resize_table(tensor, table.shape[:-1])
    rows = cols = math.isqrt(len(tensor))
    if made_for is not None:
        rows, cols = (2 * side - 1 for side in made_for)
    is_grid = isinstance(owner, GridRelativeBias | WindowRelativeBias) and leaf == "table"
    if not is_grid or rows * cols != len(tensor) or owner.offsets == (rows, cols):
        return tensor
    return resize_table(tensor.unflatten(0, (rows, cols)), owner.offsets, mode=owner.resize_mode).flatten(0, 1)


def resize_tables(model: nn.Module, resized: nn.Module) -> None:
    """Resize tables of positions in place, as :func:`fit_table` does for a checkpoint's.

    Args:
        model: the parameters stay the same objects, without gradients where they are resized.
        resized: the same model made for another size, on any device.

    Raises:
        ConfigError: where a parameter cannot be resized; nothing has changed then.
    """
    resized_modules, tables, sized = dict(resized.named_modules()), [], []
    for path, module in model.named_modules():
        other = resized_modules.get(path)
        sized += [(module, name, getattr(other, name)) for name in getattr(other, "sized", ())]
        made_for = module.size if isinstance(module, GridRelativeBias) else None
        for leaf, parameter in module.named_parameters(recurse=False):
            tensor, wanted = parameter.detach(), getattr(other, leaf, parameter)
            table = fit_table(tensor, other, leaf, made_for=made_for)
            if table.shape != wanted.shape:
                raise ConfigError(
                    f"{path}.{leaf} is {tuple(tensor.shape)} and belongs to one image size: create the model for the"
                    " other one (img_size)"
                )
            if table is not tensor:
                tables.append((parameter, table))
    for parameter, table in tables:
        parameter.data, parameter.grad = table, None
    for module, name, value in sized:
        setattr(module, name, value)
