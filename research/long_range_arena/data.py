"""Read the samples of a task from files, and create batches.

Text (IMDb) and Retrieval (ACL Anthology Network) are read as published, with their bytes as tokens. ListOps is
generated once and kept in a file, or read as the Long Range Arena released it.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backbones.errors import ConfigError
from backbones.files import atomic_write

# A token's id is its byte plus 1; 0 is padding.
PADDING, FIRST_ID = 0, 1
SPLITS = ("train", "val", "test")


# The ids (B, N) int64 and the mask (B, N) bool, True for real tokens, of each document of B samples; labels (B,) int64.
Batch = tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]


def pad(texts: Sequence[bytes], device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Return ids (B, N) int64 and mask (B, N) bool, True for real tokens; N is the length of the longest text."""
    ids = np.full((len(texts), max(1, *map(len, texts))), PADDING, dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        row[: len(text)] += FIRST_ID
    ids = torch.from_numpy(ids).to(device)
    return ids, ids != PADDING


@dataclasses.dataclass(frozen=True)
class Examples:
    """The samples of a split.

    Attributes:
        documents: One or two lists of S texts, whose bytes are the tokens.
        labels: (S,) int64.
    """

    documents: tuple[list[bytes], ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int], device: str | torch.device = "cpu") -> Batch:
        """Return samples on a device."""
        documents = tuple(pad([texts[index] for index in indices], device) for texts in self.documents)
        return documents, torch.from_numpy(self.labels[indices]).to(device)

    def shuffled_batches(self, batch_size: int, seed: int, device: str | torch.device = "cpu") -> Iterator[Batch]:
        """Yield batches of all samples in random order without end. A batch may have samples of two passes."""
        generator = np.random.default_rng(seed)
        queue = np.empty(0, dtype=np.int64)
        while True:
            while len(queue) < batch_size:
                queue = np.concatenate([queue, generator.permutation(len(self))])
            yield self.batch(queue[:batch_size], device)
            queue = queue[batch_size:]

    @property
    def chance(self) -> float:
        """Return the share of the most frequent class: the accuracy of a constant prediction."""
        return float(np.bincount(self.labels).max() / len(self))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The splits of a task. The best weights on ``val`` are evaluated on ``test``."""

    train: Examples
    val: Examples
    test: Examples


def cut(tokens: np.ndarray, ends: np.ndarray) -> list[bytes]:
    """Split tokens (T,) uint8 into texts, which end at ``ends`` (S,)."""
    data, ends = tokens.tobytes(), ends.tolist()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def read_imdb(folder: str | Path, *, read_length: int) -> Dataset:
    """Read ``folder/aclImdb/{train,test}/{pos,neg}/*.txt``, label 1 for positive reviews.

    IMDb has no validation split: as in the official pipeline it is the test split.

    Args:
        read_length: Bytes of a review that are read.
    """
    train, test = (_read_reviews(Path(folder) / "aclImdb" / split, read_length) for split in ("train", "test"))
    return Dataset(train, test, test)


def _read_reviews(folder: Path, read_length: int) -> Examples:
    texts, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ConfigError(f"'{folder / name}' has no *.txt. Unpack aclImdb_v1.tar.gz into the folder of --data.")
        texts += [path.read_bytes()[:read_length] for path in paths]
        labels += [label] * len(paths)
    return Examples((texts,), np.array(labels, dtype=np.int64))


def read_pairs(folder: str | Path, *, read_length: int) -> Dataset:
    """Read ``new_aan_pairs.{train,eval,test}.tsv``. A line has a label, two names and two texts.

    The label is 1 if one paper cites the other.

    Args:
        read_length: Bytes of a paper that are read.
    """
    names = {"train": "train", "val": "eval", "test": "test"}
    paths = {split: Path(folder) / f"new_aan_pairs.{name}.tsv" for split, name in names.items()}
    return Dataset(**{split: _read_pairs(path, read_length) for split, path in paths.items()})


def _read_pairs(path: Path, read_length: int) -> Examples:
    first, second, labels = [], [], []
    for number, line in enumerate(_lines(path), 1):
        columns = line.rstrip(b"\r\n").split(b"\t")
        # The labels are written as decimal numbers.
        if len(columns) != 5 or columns[0] not in (b"0", b"0.0", b"1", b"1.0"):
            raise ConfigError(f"{path} line {number} is not a label of 0 or 1, two names and two texts. Correct it.")
        labels.append(int(float(columns[0])))
        first.append(columns[3][:read_length])
        second.append(columns[4][:read_length])
    return Examples((first, second), np.array(labels, dtype=np.int64))


def read_released_listops(folder: str | Path, *, read_length: int, words: tuple[str, ...]) -> Dataset:
    """Read ``basic_{train,val,test}.tsv``. A line after the header has a tree with round brackets, a tab and a digit.

    Args:
        read_length: Tokens of a sample that are read.
        words: The vocabulary. The index of a word is its token.
    """
    tokens = {word.encode(): bytes([token]) for token, word in enumerate(words)}
    splits = {split: _read_listops(Path(folder) / f"basic_{split}.tsv", read_length, tokens) for split in SPLITS}
    return Dataset(**splits)


def _read_listops(path: Path, read_length: int, tokens: dict[bytes, bytes]) -> Examples:
    texts, labels = [], []
    for number, line in enumerate(_lines(path)[1:], 2):
        source, _, target = line.strip().partition(b"\t")
        words = source.translate(None, b"()").split()
        if not words or not all(word in tokens for word in words) or len(target) != 1 or not target.isdigit():
            raise ConfigError(f"{path} line {number} is not a ListOps tree, a tab and a digit. Correct it.")
        texts.append(b"".join(tokens[word] for word in words)[:read_length])
        labels.append(int(target))
    return Examples((texts,), np.array(labels, dtype=np.int64))


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file of the Long Range Arena's release."""
    if not path.is_file():
        raise ConfigError(f"'{path}' does not exist. Unpack lra_release.gz, and name its folder with --data.")
    lines = path.read_bytes().splitlines()
    if len(lines) < 2:
        raise ConfigError(f"'{path}' has no samples. Use the released file.")
    return lines


def write_dataset(path: Path, dataset: Dataset, arguments: dict[str, object]) -> None:
    """Write a dataset with one document per sample, and the options that it was generated with."""
    arrays = {"arguments": np.array(json.dumps(arguments, sort_keys=True))}
    for split in SPLITS:
        examples: Examples = getattr(dataset, split)
        (texts,) = examples.documents
        arrays[f"{split}_tokens"] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        arrays[f"{split}_ends"] = np.cumsum([len(text) for text in texts], dtype=np.int64)
        arrays[f"{split}_labels"] = examples.labels
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)
    logging.getLogger(__name__).info("wrote %s", path)


def read_dataset(path: Path, arguments: dict[str, object]) -> Dataset:
    """Read a dataset of :func:`write_dataset`.

    Raises:
        ConfigError: For a damaged file, or one that was generated by other arguments.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        written = json.loads(str(arrays["arguments"]))
        splits = {
            split: Examples((cut(arrays[f"{split}_tokens"], arrays[f"{split}_ends"]),), arrays[f"{split}_labels"])
            for split in SPLITS
        }
    except Exception as error:  # A damaged archive may raise anything.
        raise ConfigError(f"Cannot read '{path}'. Remove it to generate it again.") from error
    if written != arguments:
        raise ConfigError(f"'{path}' was generated with other options. Remove it to generate it again.")
    return Dataset(**splits)
