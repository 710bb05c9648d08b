"""Positions: absolute 2-D tables, relative bias for windows and for whole maps, and their resizing."""

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from backbones.errors import InputError


def position_parameter(*shape: int) -> nn.Parameter:
    """A table of positions, biases or tokens, drawn as ViL draws them."""
    return nn.Parameter(trunc_normal_(torch.empty(shape), std=0.02))


def resize_table(table: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize a table of positions with (bi)linear interpolation, as ViL does once before training (section 4.3).

    Args:
        table: (L, C) or (H, W, C).
        size: the new (L,) or (H, W).

    Returns:
        (*size, C), in the type of ``table``; half-pixel centres, as ``align_corners=False``.
    """
    # A traced size is a tensor, and its comparison would be frozen into the graph.
    if not torch.jit.is_tracing() and tuple(table.shape[:-1]) == tuple(size):
        return table
    mode = "linear" if len(size) == 1 else "bilinear"
    channels_first = table.movedim(-1, 0)[None]
    if table.dtype in (torch.float16, torch.bfloat16):
        channels_first = channels_first.float()
    return F.interpolate(channels_first, size=size, mode=mode, align_corners=False)[0].movedim(0, -1).to(table.dtype)


class AbsolutePositions(nn.Module):
    """The 2-D positions of ViL (section 3.1): a table for rows and one for columns, concatenated over channels.

    Args:
        dim: channels, even.
        max_height, max_width: largest map, in tokens; a smaller map takes the top-left part.
        num_global_tokens: G; each global token has a position of its own.
    """

    undecayed = ("rows", "cols", "global_tokens")

    def __init__(self, dim: int, *, max_height: int, max_width: int, num_global_tokens: int) -> None:
        super().__init__()
        self.rows = position_parameter(max_height, dim // 2)
        self.cols = position_parameter(max_width, dim // 2)
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None

    def forward(self, height: int, width: int) -> Tensor:
        """The positions of a map, (height, width, C)."""
        # A traced size is a tensor, and its comparison would be frozen into the graph.
        if not torch.jit.is_tracing() and (height > len(self.rows) or width > len(self.cols)):
            raise InputError(
                f"a map of {height} x {width} tokens does not fit the position table of {len(self.rows)} x "
                f"{len(self.cols)}; raise max_img_size (MODEL.TRANSFORMER.MAX_IMG_SIZE) to the largest image side"
            )
        rows, cols = self.rows[:height, None], self.cols[None, :width]
        return torch.cat([rows.expand(-1, width, -1), cols.expand(height, -1, -1)], dim=-1)


class WindowRelativeBias(nn.Module):
    """A learned bias for each offset between a query and the keys of its 3w x 3w neighbourhood, for each head.

    The table is laid out as in the official ViL code: the row of offset (dh, dw), query minus key, is
    ``(dh + 2w - 1) * (4w - 1) + dw + 2w - 1``.
    """

    undecayed = ("table",)

    def __init__(self, window_size: int, num_heads: int) -> None:
        super().__init__()
        self.window_size = window_size
        self.table = position_parameter((4 * window_size - 1) ** 2, num_heads)
        query, key = torch.arange(window_size) + window_size, torch.arange(3 * window_size)
        offset = query[:, None] - key[None, :] + 2 * window_size - 1
        # (w, 1, 3w, 1) and (1, w, 1, 3w)
        index = offset[:, None, :, None] * (4 * window_size - 1) + offset[None, :, None, :]
        self.register_buffer("index", index.reshape(window_size**2, 9 * window_size**2), persistent=False)

    def forward(self) -> Tensor:
        """(M, w * w, 9 * w * w): places in the chunk, by places in its neighbourhood, both row by row."""
        return self.table[self.index].movedim(-1, 0)


class GridRelativeBias(nn.Module):
    """A learned bias for each offset between two tokens of one map, and between them and the global tokens.

    Args:
        size: height and width, in tokens, of the map that the table is made for; other maps resize it (bilinear).
        num_heads: M.
        num_global_tokens: G.
        global_queries: whether the global tokens are queries too.
    """

    undecayed = ("table", "local_to_global", "global_to_local", "global_to_global")

    def __init__(
        self, size: tuple[int, int], num_heads: int, *, num_global_tokens: int = 0, global_queries: bool = False
    ) -> None:
        super().__init__()
        self.size = size
        self.num_global_tokens = num_global_tokens
        self.global_queries = global_queries and num_global_tokens > 0
        self.table = position_parameter((2 * size[0] - 1) * (2 * size[1] - 1), num_heads)
        if num_global_tokens:
            self.local_to_global = position_parameter(num_heads, num_global_tokens)
        if self.global_queries:
            self.global_to_local = position_parameter(num_heads, num_global_tokens)
            self.global_to_global = position_parameter(num_heads, num_global_tokens, num_global_tokens)

    def forward(self, height: int, width: int) -> Tensor:
        """The bias of a map of ``height`` x ``width``: (M, L, G + H * W), L the local or all queries, globals first."""
        grid = self.table.unflatten(0, (2 * self.size[0] - 1, 2 * self.size[1] - 1))
        grid = resize_table(grid, (2 * height - 1, 2 * width - 1)).flatten(0, 1)
        rows = torch.arange(height, device=grid.device)
        cols = torch.arange(width, device=grid.device)
        row_offset = rows[:, None] - rows[None, :] + height - 1
        col_offset = cols[:, None] - cols[None, :] + width - 1
        # (H, W, H, W)
        index = row_offset[:, None, :, None] * (2 * width - 1) + col_offset[None, :, None, :]
        # (M, H * W, H * W)
        bias = grid[index.flatten(2, 3).flatten(0, 1)].movedim(-1, 0)
        if self.num_global_tokens:
            bias = torch.cat([self.local_to_global[:, None].expand(-1, bias.shape[1], -1), bias], dim=2)
        if self.global_queries:
            to_local = self.global_to_local[:, :, None].expand(-1, -1, bias.shape[1])
            bias = torch.cat([torch.cat([self.global_to_global, to_local], dim=2), bias], dim=1)
        return bias
