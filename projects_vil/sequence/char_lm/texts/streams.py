"""A long text as parallel streams, cut into parts that follow each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backbones.utils.errors import InputError


@dataclass(frozen=True)
class Part:
    """Shapes: B streams, N bytes, fewer in the last part.

    Attributes:
        inputs: (B, N) int64.
        targets: (B, N) int64, the byte after each input.
        is_own: (B, N) bool, False where the next stream has that target too.
    """

    inputs: Tensor
    targets: Tensor
    is_own: Tensor


class Streams:
    """B streams of equal length that together have each byte of a text but the first as a target.

    Where B does not divide the number of targets, a stream's last target is also the first of the next one.

    Args:
        ids: (T,), a text.
        num_streams: B.
        length: bytes of a part.

    Raises:
        InputError: where there are more streams than targets.
    """

    def __init__(self, ids: Tensor, num_streams: int, length: int) -> None:
        targets = len(ids) - 1
        if targets < num_streams:
            raise InputError(
                f"{len(ids)} bytes of text are too few for {num_streams} streams: take a smaller --batch-size"
            )
        self.ids, self.length = ids, length
        starts = [stream * targets // num_streams for stream in range(num_streams)]
        own = [after - before for before, after in zip(starts, [*starts[1:], targets], strict=True)]
        self.starts, self.own = torch.tensor(starts), torch.tensor(own)
        self.stream_length = -(-targets // num_streams)

    def __len__(self) -> int:
        """Parts of a stream."""
        return -(-self.stream_length // self.length)

    def part(self, index: int) -> Part:
        """The part with this index of all streams."""
        first = index * self.length
        places = torch.arange(first, min(first + self.length, self.stream_length))
        inputs = self.starts[:, None] + places
        is_own = places < self.own[:, None]
        return Part(self.ids[inputs].long(), self.ids[inputs + 1].long(), is_own)
