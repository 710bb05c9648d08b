"""ListOps: samples are what they are said to be, the same for a seed, and kept on the disk."""

import statistics

import numpy as np
import pytest

from backbones import InputError
from projects_vil.sequence.lra import (
    Dataset,
    Examples,
    ListOpsRules,
    generate_listops,
    listops,
    load_listops,
    read_released_listops,
    without_brackets,
    words_of,
)

SHORT = ListOpsRules(min_length=10, max_length=60)
FEW = {"num_train": 300, "num_dev": 40, "num_test": 50}
OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(words: list[str]) -> tuple[int, int, int]:
    """Value, depth and most arguments of a sample, by a stack."""
    open_lists, deepest, most, value = [], 1, 0, None
    for word in words:
        assert value is None, "there is more behind the end"
        if word in OPERATIONS:
            open_lists.append([word])
            continue
        if word == "]":
            operator, *arguments = open_lists.pop()
            assert len(arguments) >= 2
            most, result = max(most, len(arguments)), OPERATIONS[operator](arguments)
        else:
            result = int(word)
            deepest = max(deepest, len(open_lists) + 1)
        if open_lists:
            open_lists[-1].append(result)
        else:
            value = result
    return value, deepest, most


def texts_of(examples: Examples) -> list[str]:
    return [words_of(examples.documents[0][index]) for index in range(len(examples))]


def splits_of(dataset: Dataset) -> tuple[Examples, ...]:
    return dataset.train, dataset.dev, dataset.test


@pytest.fixture(scope="module")
def published():
    return generate_listops(ListOpsRules(), num_train=600, num_dev=10, num_test=10, seed=3)


@pytest.mark.parametrize("rules", [ListOpsRules(), SHORT, ListOpsRules(3, 30, max_depth=3, max_arguments=3)], ids=str)
def test_labels_are_the_values_of_the_samples(rules):
    for examples in splits_of(generate_listops(rules, num_train=60, num_dev=20, num_test=20)):
        for text, label in zip(texts_of(examples), examples.labels, strict=True):
            words = text.split()
            value, depth, arguments = evaluate(words)
            assert value == label
            assert rules.min_length < len(words) < rules.max_length
            assert depth <= rules.max_depth and arguments <= rules.max_arguments


def test_the_splits_are_alike():
    """Short samples soon become rare: in the order of their making the last ones would be longer."""
    rules = ListOpsRules(min_length=4, max_length=12)
    dataset = generate_listops(rules, num_train=20000, num_dev=1000, num_test=1000)
    train, dev, test = (
        statistics.mean(len(split.documents[0][index]) for index in range(len(split))) for split in splits_of(dataset)
    )
    assert dev == pytest.approx(train, abs=0.15) and test == pytest.approx(train, abs=0.15)


def test_splits_have_their_sizes_and_no_sample_is_there_twice():
    splits = splits_of(generate_listops(SHORT, **FEW))
    assert [len(split) for split in splits] == [300, 40, 50]
    texts = [text for split in splits for text in texts_of(split)]
    assert len(set(texts)) == len(texts)


def test_a_seed_gives_the_same_samples_and_another_one_others():
    first, again, other = (generate_listops(SHORT, **FEW, seed=seed) for seed in (1, 1, 2))
    for one, two in zip(splits_of(first), splits_of(again), strict=True):
        assert texts_of(one) == texts_of(two) and (one.labels == two.labels).all()
    assert not set(texts_of(first.dev)) & set(texts_of(other.dev))


def test_lengths_are_spread_as_the_paper_says(published):
    """Table 1 has 888 +- 339 tokens, which are those without closing brackets."""
    lengths = without_brackets(published).train.documents[0].lengths
    assert abs(lengths.mean() - 888) < 60 and abs(lengths.std() - 339) < 40
    with_brackets = published.train.documents[0].lengths
    shares = np.histogram(with_brackets, bins=[501, 800, 1100, 1400, 1700, 2000])[0] / len(with_brackets)
    # Longer ones are rarer, and all are there.
    assert (np.diff(shares) < 0).all() and shares.min() > 0.03


def test_classes_are_all_there_and_the_ends_are_more_frequent(published):
    shares = np.bincount(published.train.labels, minlength=10) / 600
    assert shares.min() > 0.04 and {0, 9} == set(np.argsort(shares)[-2:])
    assert published.train.chance == shares.max()


def test_without_brackets_nothing_else_is_lost(published):
    for before, after in zip(splits_of(published), splits_of(without_brackets(published)), strict=True):
        assert [text.replace(" ]", "") for text in texts_of(before)] == texts_of(after)
        assert (before.labels == after.labels).all()


@pytest.mark.parametrize(
    "lengths, said",
    [((500, 501), "shorter than the other"), ((0, 100), "--min-length 0"), ((1, 4), "4 tokens or more")],
)
def test_lengths_that_cannot_be(lengths, said):
    with pytest.raises(InputError, match=said):
        generate_listops(ListOpsRules(*lengths), num_train=1, num_dev=1, num_test=1)


def test_more_samples_than_there_are(monkeypatch):
    """Of 4 tokens there are the four operators with two digits: 400."""
    monkeypatch.setattr(listops, "_PATIENCE", 20_000)
    with pytest.raises(InputError, match="400 different samples were found, and 401 are needed"):
        generate_listops(ListOpsRules(3, 5, max_depth=2, max_arguments=2), num_train=399, num_dev=1, num_test=1)


def test_what_was_generated_is_read_again(tmp_path):
    folder = tmp_path / "new" / "lra"
    first = load_listops(folder, SHORT, **FEW)
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    again = load_listops(folder, SHORT, **FEW)
    assert path.stat().st_mtime_ns == written
    for one, two in zip(splits_of(first), splits_of(again), strict=True):
        assert texts_of(one) == texts_of(two) and (one.labels == two.labels).all()


def test_a_damaged_file_is_named(tmp_path):
    load_listops(tmp_path, SHORT, **FEW)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match=f"{path.name} cannot be read: remove it"):
        load_listops(tmp_path, SHORT, **FEW)


def test_a_file_of_other_rules_is_not_taken(tmp_path):
    """The file's name does not say all that it was generated by."""
    load_listops(tmp_path, SHORT, **FEW)
    with pytest.raises(InputError, match="was generated by other rules"):
        load_listops(tmp_path, ListOpsRules(10, 60, max_arguments=4), **FEW)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="the folder cannot be made"):
        load_listops(tmp_path / "file", SHORT, **FEW)


# -- the released files ----------------------------------------------------------------------------


def as_released(words: list[str]) -> str:
    """The pairs of round brackets that the published generator writes: ( ( ( [MIN 3 ) 4 ) ] )."""
    open_lists: list[list[str]] = [[]]
    for word in words:
        if word in OPERATIONS:
            open_lists.append([word])
            continue
        if word == "]":
            paired, *rest = [*open_lists.pop(), word]
            for other in rest:
                paired = f"( {paired} {other} )"
            word = paired
        open_lists[-1].append(word)
    return open_lists[0][0]


def write_released(folder, dataset: Dataset) -> None:
    for name, examples in zip(("train", "val", "test"), splits_of(dataset), strict=True):
        rows = zip(texts_of(examples), examples.labels, strict=True)
        lines = [f"{as_released(text.split())}\t{label}\r\n" for text, label in rows]
        (folder / f"basic_{name}.tsv").write_text("".join(["Source\tTarget\r\n", *lines]), newline="")


def test_released_files(tmp_path):
    dataset = generate_listops(SHORT, num_train=20, num_dev=5, num_test=6)
    write_released(tmp_path, dataset)
    read = read_released_listops(tmp_path, longest=30)
    for one, two in zip(splits_of(dataset), splits_of(read), strict=True):
        assert [" ".join(text.split()[:30]) for text in texts_of(one)] == texts_of(two)
        assert (one.labels == two.labels).all()


@pytest.mark.parametrize(
    "line", ["( [MIN 3 4 ] )\tx", "( [TOP 3 4 ] )\t3", "( [MIN 3 4 ] )", "\t3", "[MIN \x0b 2 ]\t2", "[MIN \xe9 2 ]\t2"]
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    write_released(tmp_path, generate_listops(SHORT, num_train=2, num_dev=1, num_test=1))
    with (tmp_path / "basic_val.tsv").open("a", newline="") as file:
        file.write(line + "\r\n")
    with pytest.raises(InputError, match="basic_val.tsv line 3 is no ListOps sample"):
        read_released_listops(tmp_path, longest=2000)


def test_released_files_that_are_missing(tmp_path):
    with pytest.raises(InputError, match=r"there is no .*basic_train\.tsv"):
        read_released_listops(tmp_path, longest=2000)
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n")
    with pytest.raises(InputError, match=r"basic_train\.tsv has no samples"):
        read_released_listops(tmp_path, longest=2000)
