"""A text as token ids, and its parallel streams."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backbones.errors import ConfigError

# Percent of the bytes, in the order of the file; the rest is the test part (LS section 4.2).
TRAIN_PERCENT, VAL_PERCENT = 90, 5
_LEAST_BYTES = 100


class Vocabulary:
    """A map from bytes to ids: one id for each known byte, in ascending order, then one id for all others.

    Args:
        known: Bytes, 0 to 255, in ascending order.
    """

    def __init__(self, known: Sequence[int]) -> None:
        self.known = list(known)
        self._ids = np.full(256, self.other, dtype=np.int16)
        self._ids[self.known] = np.arange(len(self.known))

    def __len__(self) -> int:
        return len(self.known) + 1

    @property
    def other(self) -> int:
        """The id of every unknown byte."""
        return len(self.known)

    def encode(self, data: bytes) -> Tensor:
        """Return the id of each byte: (N,) int16."""
        return torch.from_numpy(self._ids[np.frombuffer(data, dtype=np.uint8)])

    def encode_prompt(self, prompt: str) -> Tensor:
        """Return the ids of a text's UTF-8 bytes.

        Raises:
            ConfigError: If the prompt is empty or has an unknown byte.
        """
        data = prompt.encode(errors="surrogateescape")
        unknown = sorted(set(data) - set(self.known))
        if not data or unknown:
            raise ConfigError(
                f"The prompt {prompt!r} is empty, or has bytes that are not in the training text: {unknown}. Change it."
            )
        return self.encode(data)

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ids. The id of unknown bytes becomes ``?``."""
        return bytes(self.known[i] if i < len(self.known) else ord("?") for i in ids)


@dataclass(frozen=True)
class Text:
    """The parts of a file as ids.

    Attributes:
        train: (N,) int16.
        val, test: The same. Each starts with the byte before it, from which its first byte is predicted.
        sha256: SHA-256 of the file.
    """

    vocabulary: Vocabulary
    train: Tensor
    val: Tensor
    test: Tensor
    sha256: str


def read_text(path: str | Path, *, vocabulary: Vocabulary | None = None) -> Text:
    """Read a file: the first 90 percent of its bytes train, the next 5 validate, the last 5 test.

    Args:
        vocabulary: Vocabulary of a trained model; None for the bytes of the training part.

    Raises:
        ConfigError: For a file of fewer than 100 bytes.
    """
    data = Path(path).read_bytes()
    if len(data) < _LEAST_BYTES:
        raise ConfigError(f"'{path}' has {len(data)} bytes. Use a text of at least {_LEAST_BYTES} bytes.")
    first, second = (len(data) * percent // 100 for percent in (TRAIN_PERCENT, TRAIN_PERCENT + VAL_PERCENT))
    vocabulary = vocabulary or Vocabulary(sorted(set(data[:first])))
    parts = (data[:first], data[first - 1 : second], data[second - 1 :])
    return Text(vocabulary, *map(vocabulary.encode, parts), hashlib.sha256(data).hexdigest())


class Streams:
    """B parallel streams of equal length. Together their targets are all bytes of a text, except for the first.

    If B does not divide the number of targets, the last target of a stream is also the first target of the next one.

    Args:
        ids: (T,), a text.
        num_streams: B.
        length: Bytes of a block.
    """

    def __init__(self, ids: Tensor, num_streams: int, length: int) -> None:
        num_targets = len(ids) - 1
        if num_targets < num_streams:
            advice = "Use a longer text or a smaller batch_size."
            raise ConfigError(f"A text of {len(ids)} bytes is too short for batch_size={num_streams} streams. {advice}")
        self.ids, self.length = ids, length
        starts = [stream * num_targets // num_streams for stream in range(num_streams)]
        lengths = [after - before for before, after in zip(starts, [*starts[1:], num_targets], strict=True)]
        self.starts, self.lengths = torch.tensor(starts), torch.tensor(lengths)
        self.stream_length = -(-num_targets // num_streams)

    def __len__(self) -> int:
        """The number of blocks of a stream."""
        return -(-self.stream_length // self.length)

    def block(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block of all streams. N is the length of a block, or less for the last one.

        Returns:
            inputs: (B, N) int64
            targets: (B, N) int64, the byte after each input
            is_first: (B, N) bool, False if the target is also a target of the next stream
        """
        first = index * self.length
        positions = torch.arange(first, min(first + self.length, self.stream_length))
        inputs = self.starts[:, None] + positions
        return self.ids[inputs].long(), self.ids[inputs + 1].long(), positions < self.lengths[:, None]
