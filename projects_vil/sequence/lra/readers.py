"""Text (IMDb) and Retrieval (ACL Anthology Network), as published: their bytes are the tokens."""

from pathlib import Path

import numpy as np

from backbones.utils.errors import InputError
from projects_vil.sequence.lra.examples import Dataset, Examples, Sequences

IMDB, PAIRS = "aclImdb", "new_aan_pairs"
_REVIEWS = {"neg": 0, "pos": 1}
_PAIR_SPLITS = {"train": "train", "dev": "eval", "test": "test"}
_COLUMNS = "label, two names and two texts"


def read_imdb(folder: str | Path, *, longest: int) -> Dataset:
    """Reviews, 1 where they are positive; there is no dev in IMDb, and dev is test, as in the official pipeline.

    Args:
        folder: that ``aclImdb`` lies in, as published: ``aclImdb/train/pos/*.txt``.
        longest: bytes of a review that are read.

    Raises:
        InputError: for a folder that is missing or empty, and for a file that cannot be read.
    """
    root = Path(folder) / IMDB
    train, test = (_read_reviews(root / split, longest) for split in ("train", "test"))
    return Dataset(train, test, test)


def _read_reviews(folder: Path, longest: int) -> Examples:
    texts, labels = [], []
    for name, label in _REVIEWS.items():
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise InputError(
                f"there are no reviews {folder / name}/*.txt: unpack aclImdb_v1.tar.gz of "
                "https://ai.stanford.edu/~amaas/data/sentiment and name the folder of aclImdb by --data"
            )
        texts += [_read_bytes(path)[:longest] for path in paths]
        labels += [label] * len(paths)
    return Examples((Sequences.join(texts),), np.array(labels, dtype=np.int64))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_pairs(folder: str | Path, *, longest: int) -> Dataset:
    """Pairs of papers, 1 where one cites what the other does.

    Args:
        folder: of ``new_aan_pairs.train.tsv``, ``.eval.tsv`` and ``.test.tsv``, as the Long Range Arena released them.
        longest: bytes of a paper that are read.

    Raises:
        InputError: for a file that is missing or empty, and for a line that is no pair, which it names.
    """
    return Dataset(
        **{split: _read_pairs(Path(folder) / f"{PAIRS}.{name}.tsv", longest) for split, name in _PAIR_SPLITS.items()}
    )


def _read_pairs(path: Path, longest: int) -> Examples:
    if not path.is_file():
        raise InputError(
            f"there is no {path}: unpack https://storage.googleapis.com/long-range-arena/lra_release.gz and name its "
            "folder tsv_data by --data"
        )
    first, second, labels = [], [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            label = _label(columns[0])
            if len(columns) != 5 or label is None:
                raise InputError(f"{path} line {number} is no pair: {_COLUMNS}, with tabs between them; label 0 or 1")
            first.append(columns[3][:longest])
            second.append(columns[4][:longest])
            labels.append(label)
    if not labels:
        raise InputError(f"{path} has no pairs")
    return Examples((Sequences.join(first), Sequences.join(second)), np.array(labels, dtype=np.int64))


def _label(text: bytes) -> int | None:
    """The files have it as a number with a point."""
    return {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}.get(text)
