"""A file as numbers: its bytes, those that the training part has as one number each, and the rest as one together."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backbones.utils.errors import InputError, check_file

# Of 100 bytes, in the order of the file; the rest is the test part (section 4.2).
TRAIN_SHARE, DEV_SHARE = 90, 5
_LEAST_BYTES = 100


class Vocabulary:
    """Bytes as ids: those it was made of in rising order, then one id for all others.

    Args:
        known: bytes, 0 to 255.

    Raises:
        InputError: where ``known`` are no rising bytes.
    """

    def __init__(self, known: Sequence[int]) -> None:
        self.known = list(known)
        if not self.known or self.known != sorted(set(self.known)) or not 0 <= self.known[0] <= self.known[-1] <= 255:
            raise InputError("a vocabulary is a list of bytes, 0 to 255, in rising order")
        self._ids = np.full(256, self.other, dtype=np.int16)
        self._ids[self.known] = np.arange(len(self.known))

    def __len__(self) -> int:
        return len(self.known) + 1

    @property
    def other(self) -> int:
        """The id of every byte that is not known."""
        return len(self.known)

    @property
    def num_unknown(self) -> int:
        """How many of the 256 bytes are not known."""
        return 256 - len(self.known)

    def encode(self, data: bytes) -> Tensor:
        """(N,) int16, an id for each byte."""
        return torch.from_numpy(self._ids[np.frombuffer(data, dtype=np.uint8)])

    def encode_prompt(self, prompt: str) -> Tensor:
        """As :meth:`encode`, of a text's UTF-8 bytes.

        Raises:
            InputError: for an empty prompt, and for a byte that the model was not trained on.
        """
        if not prompt:
            raise InputError("--prompt is empty: it is the text that the sample goes on from")
        # What a terminal gave that is no UTF-8 stays the bytes it was.
        data = prompt.encode(errors="surrogateescape")
        for place, byte in enumerate(data):
            if byte not in self.known:
                shown = repr(chr(byte)) if byte < 128 else f"0x{byte:02x}"
                raise InputError(
                    f"--prompt: byte {place + 1}, {shown}, is not in the text that was trained on: choose another text"
                )
        return self.encode(data)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The bytes of known ids; another byte stands as ``?``."""
        return bytes(self.known[i] if i < len(self.known) else ord("?") for i in ids)


@dataclass(frozen=True)
class Text:
    """A file's three parts as ids.

    Attributes:
        train: (N,) int16.
        dev, test: the same, each with the byte before its first one in front, from which that one is predicted.
        digest: SHA-256 of the file, in hexadecimal.
    """

    vocabulary: Vocabulary
    train: Tensor
    dev: Tensor
    test: Tensor
    digest: str


def read_text(path: str | Path, *, vocabulary: Vocabulary | None = None) -> Text:
    """The first 90 of 100 bytes of a file for training, the next 5 for choosing, the last 5 for testing.

    Args:
        path: any file.
        vocabulary: of a trained model; that of the training part without it.

    Raises:
        InputError: for a file that is missing, cannot be read, or has less than 100 bytes.
    """
    check_file(path, "text", named_by="--data")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error
    if len(data) < _LEAST_BYTES:
        raise InputError(f"--data {path} has {len(data)} bytes: at least {_LEAST_BYTES} make three parts")
    first, second = (len(data) * share // 100 for share in (TRAIN_SHARE, TRAIN_SHARE + DEV_SHARE))
    vocabulary = vocabulary or Vocabulary(sorted(set(data[:first])))
    return Text(
        vocabulary=vocabulary,
        train=vocabulary.encode(data[:first]),
        dev=vocabulary.encode(data[first - 1 : second]),
        test=vocabulary.encode(data[second - 1 :]),
        digest=hashlib.sha256(data).hexdigest(),
    )
