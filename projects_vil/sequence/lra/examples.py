"""Samples of a task in memory: sequences of different lengths in one array, and their labels."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# A token's id is its byte and 1; 0 is padding.
PADDING, FIRST_ID = 0, 1


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences one after the other.

    Attributes:
        tokens: (T,) uint8, all tokens.
        ends: (S,) int64, where each sequence ends in ``tokens``.
    """

    tokens: np.ndarray
    ends: np.ndarray

    @classmethod
    def join(cls, texts: list[bytes]) -> "Sequences":
        """Of texts whose bytes are the tokens."""
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of a sequence: (N,) uint8."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def lengths(self) -> np.ndarray:
        """(S,) int64"""
        return np.diff(self.ends, prepend=0)

    def pad(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids (B, N) int64 and mask (B, N) bool, True for real tokens, of some sequences; N is that of the longest."""
        chosen = [self[index] for index in indices]
        ids = np.full((len(chosen), max(1, *map(len, chosen))), PADDING, dtype=np.int64)
        for row, sequence in zip(ids, chosen, strict=True):
            row[: len(sequence)] = sequence
            row[: len(sequence)] += FIRST_ID
        ids = torch.from_numpy(ids)
        return ids, ids != PADDING


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples to train on.

    Attributes:
        documents: ids (B, N) int64 and mask (B, N) bool of each document of a sample.
        labels: (B,) int64
    """

    documents: tuple[tuple[Tensor, Tensor], ...]
    labels: Tensor

    def to(self, device: str | torch.device) -> "Batch":
        documents = tuple((ids.to(device), mask.to(device)) for ids, mask in self.documents)
        return Batch(documents, self.labels.to(device))


@dataclasses.dataclass(frozen=True)
class Examples:
    """The samples of a split.

    Attributes:
        documents: one or two, each with S sequences.
        labels: (S,) int64
    """

    documents: tuple[Sequences, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> Batch:
        documents = tuple(sequences.pad(indices) for sequences in self.documents)
        return Batch(documents, torch.from_numpy(self.labels[indices]))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Each sample once; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self.batch(np.arange(start, min(start + batch_size, len(self))))

    def endlessly(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Each sample once in a random order, then all again in another one; batches go over the border."""
        generator = np.random.default_rng(seed)
        waiting = np.empty(0, dtype=np.int64)
        while True:
            while len(waiting) < batch_size:
                waiting = np.concatenate([waiting, generator.permutation(len(self))])
            yield self.batch(waiting[:batch_size])
            waiting = waiting[batch_size:]

    @property
    def chance(self) -> float:
        """The share of the most frequent class: what always saying it would score."""
        return float(np.bincount(self.labels).max() / len(self))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The splits of a task; a model is chosen on dev and judged on test."""

    train: Examples
    dev: Examples
    test: Examples
