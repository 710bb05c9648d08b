"""Reviews and pairs of papers, from small files as they are published."""

import numpy as np
import pytest

from backbones import InputError
from projects_vil.sequence.lra import read_imdb, read_pairs


def write_imdb(folder) -> None:
    for split, reviews in {"train": 3, "test": 2}.items():
        for name in ("pos", "neg"):
            (folder / "aclImdb" / split / name).mkdir(parents=True)
            for number in range(reviews):
                text = f"{name} {split} {number}: caf\u00e9 <br />" * (number + 1)
                (folder / "aclImdb" / split / name / f"{number}_{number + 4}.txt").write_text(text, encoding="utf-8")


def test_imdb(tmp_path):
    write_imdb(tmp_path)
    dataset = read_imdb(tmp_path, longest=40)
    assert [len(split) for split in (dataset.train, dataset.dev, dataset.test)] == [6, 4, 4]
    assert dataset.dev is dataset.test
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    (reviews,) = dataset.train.documents
    assert reviews[3].tobytes() == "pos train 0: caf\u00e9 <br />".encode()
    assert len(reviews[5]) == 40 and reviews[5].tobytes().startswith(b"pos train 2: caf\xc3\xa9 <br />pos")
    batch = dataset.train.batch(np.array([5, 3]))
    ((ids, mask),) = batch.documents
    assert ids.shape == (2, 40) and mask.sum(1).tolist() == [40, 25]
    # A byte and 1, and 0 behind the end.
    assert ids[1, :3].tolist() == [ord("p") + 1, ord("o") + 1, ord("s") + 1] and not ids[1, 25:].any()
    assert batch.labels.tolist() == [1, 1]


def test_imdb_that_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"there are no reviews .*aclImdb/train/neg/\*\.txt: unpack .* by --data") as e:
        read_imdb(tmp_path, longest=4000)
    assert "\n" not in str(e.value)
    write_imdb(tmp_path)
    for path in (tmp_path / "aclImdb/test/pos").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="aclImdb/test/pos"):
        read_imdb(tmp_path, longest=4000)


PAIRS = ["1.0\tP1\tP2\tfirst text\tsecond", "0.0\tP3\tP4\tb'a \\xc3'\tdas \u00dc"]


def write_pairs(folder, *more: str) -> None:
    for split in ("train", "eval", "test"):
        lines = [*PAIRS, *more] if split == "eval" else PAIRS
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_pairs(tmp_path):
    write_pairs(tmp_path, "1\tP5\tP6\t\tx")
    dataset = read_pairs(tmp_path, longest=9)
    assert [len(split) for split in (dataset.train, dataset.dev, dataset.test)] == [2, 3, 2]
    first, second = dataset.dev.documents
    assert [first[i].tobytes() for i in range(3)] == [b"first tex", b"b'a \\xc3'", b""]
    assert [second[i].tobytes() for i in range(3)] == [b"second", "das \u00dc".encode(), b"x"]
    assert dataset.dev.labels.tolist() == [1, 0, 1] and dataset.dev.chance == 2 / 3
    # An empty document is padding alone.
    (ids, mask), _ = dataset.dev.batch(np.array([2])).documents
    assert ids.shape == (1, 1) and not mask.any()


@pytest.mark.parametrize("line", ["2.0\ta\tb\tc\td", "1.0\ta\tb\tc", "1.0\ta\tb\tc\td\te", "", "yes\ta\tb\tc\td"])
def test_a_line_that_is_no_pair_is_named(tmp_path, line):
    write_pairs(tmp_path, line)
    with pytest.raises(InputError, match=r"new_aan_pairs\.eval\.tsv line 3 is no pair"):
        read_pairs(tmp_path, longest=4096)


def test_pairs_that_are_missing(tmp_path):
    with pytest.raises(InputError, match=r"there is no .*new_aan_pairs\.train\.tsv: unpack .* by --data"):
        read_pairs(tmp_path, longest=4096)
    write_pairs(tmp_path)
    (tmp_path / "new_aan_pairs.test.tsv").write_text("")
    with pytest.raises(InputError, match=r"new_aan_pairs\.test\.tsv has no pairs"):
        read_pairs(tmp_path, longest=4096)
