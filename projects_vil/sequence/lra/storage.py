"""ListOps on the disk: generated once, or as the Long Range Arena released it."""

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from backbones.utils.errors import InputError
from backbones.utils.files import written_whole
from projects_vil.sequence.lra.examples import Dataset, Examples, Sequences
from projects_vil.sequence.lra.listops import CLOSE, WORDS, ListOpsRules, generate_listops

RELEASED = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
# Changes with what is generated for the same arguments.
_VERSION = 2
# Digits become tokens, and a byte that is a token already becomes one that there is not.
_DIGITS = bytes(byte - ord("0") if chr(byte) in "0123456789" else 255 if byte <= CLOSE else byte for byte in range(256))
_LETTERS = {word.encode(): 10 + number for number, word in enumerate(WORDS[10:])}


def load_listops(
    folder: str | Path,
    rules: ListOpsRules,
    *,
    num_train: int = 96000,
    num_dev: int = 2000,
    num_test: int = 2000,
    seed: int = 0,
) -> Dataset:
    """The generated splits, from ``folder`` where they are, else generated and written there.

    Args:
        folder: made where there is none.
        rules: which samples.
        seed: of the generator.

    Raises:
        InputError: as :func:`generate_listops`, for a folder that cannot be written to, and for a damaged file.
    """
    rules.check()
    sizes = {"num_train": num_train, "num_dev": num_dev, "num_test": num_test}
    for option, value, least in (*((name, size, 1) for name, size in sizes.items()), ("data_seed", seed, 0)):
        if value < least:
            raise InputError(f"--{option.replace('_', '-')} {value}: it is {least} or more")
    asked = {"version": _VERSION, **asdict(rules), **sizes, "seed": seed}
    name = f"listops_{rules.min_length}_{rules.max_length}_{num_train}_{num_dev}_{num_test}_seed{seed}.npz"
    path = Path(folder) / name
    if path.exists():
        dataset = _read(path, asked)
        logging.getLogger(__name__).info("read %s", path)
        return dataset
    start = time.perf_counter()
    dataset = generate_listops(rules, **sizes, seed=seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--data {folder}: the folder cannot be made: {error.strerror}") from error
    _write(path, dataset, asked)
    seconds = time.perf_counter() - start
    logging.getLogger(__name__).info("wrote %s: %d samples in %.0f s", path, sum(sizes.values()), seconds)
    return dataset


def without_brackets(dataset: Dataset) -> Dataset:
    """ListOps as the pipeline of the paper reads it, whose tokenizer drops all that is no letter or digit."""

    def strip(examples: Examples) -> Examples:
        (sequences,) = examples.documents
        stays = sequences.tokens != CLOSE
        ends = np.concatenate([[0], np.cumsum(stays)])[sequences.ends]
        return Examples((Sequences(sequences.tokens[stays], ends),), examples.labels)

    return Dataset(strip(dataset.train), strip(dataset.dev), strip(dataset.test))


def read_released_listops(folder: str | Path, *, longest: int) -> Dataset:
    """The splits of ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv``.

    Args:
        folder: that they lie in.
        longest: tokens of a sample that are read.

    Raises:
        InputError: for a file that is missing, and for a line that is no ListOps, which it names.
    """
    return Dataset(**{split: _read_tsv(Path(folder) / name, longest) for split, name in RELEASED.items()})


def _read_tsv(path: Path, longest: int) -> Examples:
    """Lines of a tree, in which round brackets pair everything up, a tab and a digit, below a line of titles."""
    if not path.is_file():
        raise InputError(f"there is no {path}: the Long Range Arena's {', '.join(RELEASED.values())} come together")
    texts, labels = [], []
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            source, _, target = line.strip().partition(b"\t")
            text = source.translate(_DIGITS, b"() ")
            for word, token in _LETTERS.items():
                text = text.replace(word, bytes([token]))
            if not text or max(text) > CLOSE or len(target) != 1 or not target.isdigit():
                raise InputError(f"{path} line {number} is no ListOps sample: a tree, a tab and a digit")
            texts.append(text[:longest])
            labels.append(int(target))
    if not texts:
        raise InputError(f"{path} has no samples")
    return Examples((Sequences.join(texts),), np.array(labels, dtype=np.int64))


def _write(path: Path, dataset: Dataset, asked: dict[str, object]) -> None:
    arrays = {}
    for split in RELEASED:
        examples: Examples = getattr(dataset, split)
        (sequences,) = examples.documents
        arrays |= {f"{split}_tokens": sequences.tokens, f"{split}_ends": sequences.ends}
        arrays[f"{split}_labels"] = examples.labels
    with written_whole(path) as partial, partial.open("wb") as file:
        np.savez(file, asked=np.array(json.dumps(asked, sort_keys=True)), **arrays)


def _read(path: Path, asked: dict[str, object]) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            written = json.loads(str(file["asked"]))
            splits = {
                split: Examples((Sequences(file[f"{split}_tokens"], file[f"{split}_ends"]),), file[f"{split}_labels"])
                for split in RELEASED
            }
    except Exception as error:  # A damaged file may raise anything.
        raise InputError(f"{path} cannot be read: remove it, and it is generated again") from error
    if written != asked:
        raise InputError(f"{path} was generated by other rules: remove it, and it is generated again")
    return Dataset(**splits)
