"""How the folders of the published sets are read."""

import importlib.resources
import json

import pytest
import torch
from timm.data import RealLabelsImagenet

from backbones import InputError
from projects_vil.analysis.robustness.scoring import score, top_classes
from projects_vil.analysis.robustness.sets import (
    ROBUSTNESS_SETS,
    check_sets,
    corruption_folders,
    in9_labels,
    labelled_folder,
    missing_parts,
    real_labels,
    wordnet_classes,
)
from tests.projects_vil.analysis.robustness import folders
from tests.projects_vil.analysis.robustness.folders import GOLDFINCH, STINGRAY, TENCH, write_image


def test_classes_are_numbered_by_sorted_ids():
    classes = wordnet_classes()
    assert len(classes) == 1000 and list(classes) == sorted(classes)
    assert (classes[TENCH], classes[STINGRAY], classes[GOLDFINCH], classes["n15075141"]) == (0, 6, 11, 999)


@pytest.mark.parametrize("name", ["a", "r"])
def test_a_set_of_200_classes_has_timms_numbers(tmp_path, name):
    folder = labelled_folder(tmp_path, name)
    numbers = (importlib.resources.files("timm.data") / f"_info/imagenet_{name}_indices.txt").read_text().split()
    assert folder.subset == tuple(map(int, numbers)) and len(folder.subset) == 200
    assert sorted(folder.classes.values()) == list(folder.subset)


def test_val_is_read_by_folder_and_name(tmp_path):
    folders.write_val(tmp_path)
    (tmp_path / "val" / TENCH / ".DS_Store").write_bytes(b"hidden")
    paths, labels = labelled_folder(tmp_path, "val").images()
    assert [(path.parent.name, path.name[-6:-5]) for path in paths] == [(TENCH, "2"), (STINGRAY, "1"), (STINGRAY, "3")]
    assert labels == [0, 6, 6] and labelled_folder(tmp_path, "val").subset is None


def test_real_labels_go_by_the_numbers_of_names(tmp_path):
    folders.write_val(tmp_path)
    folders.write_real(tmp_path, {1: [6, 7], 2: [0], 3: []})
    paths, _ = labelled_folder(tmp_path, "real").images()
    assert real_labels(tmp_path, paths) == [{0}, {6, 7}, set()]


@pytest.mark.parametrize("name", ["v2", "v2-threshold", "v2-top"])
def test_v2_has_class_numbers_for_names(tmp_path, name):
    # As published, 10 stands before 2.
    for number in (2, 10, 999):
        write_image(tmp_path / ROBUSTNESS_SETS[name].folder / str(number) / "a.jpeg", number)
    assert labelled_folder(tmp_path, name).images()[1] == [10, 2, 999]


def test_a_readme_beside_the_folders_is_no_class(tmp_path):
    folders.write_wordnet(tmp_path, "imagenet-a", STINGRAY, GOLDFINCH)
    assert labelled_folder(tmp_path, "a").images()[1] == [6, 11]


def test_corruptions_that_are_there(tmp_path):
    folders.write_corruptions(tmp_path, ("fog", "speckle_noise"), (1, 3))
    there = corruption_folders(tmp_path)
    assert len(there) == 15 and {name: levels for name, levels in there.items() if levels} == {"fog": [1, 3]}
    assert labelled_folder(tmp_path, "c", "fog", "3").images()[1] == [0]


def test_what_is_missing_is_named(tmp_path):
    assert missing_parts(tmp_path, "real") == ["val", "real.json"]
    folders.write_val(tmp_path)
    assert missing_parts(tmp_path, "real") == ["real.json"] and missing_parts(tmp_path, "val") == []
    (tmp_path / "sketch").write_text("a file")
    assert missing_parts(tmp_path, "sketch") == ["sketch"]


def test_sets_come_once_and_in_order():
    assert check_sets(["c", "v2", "val", "v2"]) == ["val", "v2", "c"]
    with pytest.raises(InputError, match="unknown set 'v3': .* did you mean 'v2'"):
        check_sets(["val", "v3"])


def _empty_class(data):
    (data / "val" / STINGRAY).mkdir(parents=True)


def _wrong_class(data):
    write_image(data / "val" / "n01440765" / "a.JPEG", 0)


def _no_image(data):
    write_image(data / "val" / TENCH / "a.JPEG", 0)
    (data / "val" / TENCH / "labels.txt").write_text("no image")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: (data / "val").mkdir(), "val has no folders of classes, such as n01440764"),
        (_empty_class, f"val/{STINGRAY} is empty"),
        (_wrong_class, "n01440765 is none of the 1000 classes of this set: take it away"),
        (_no_image, "labels.txt is no image by its name"),
    ],
    ids=["no class", "empty class", "wrong class", "no image"],
)
def test_a_folder_that_is_not_as_published(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(InputError, match=message):
        labelled_folder(tmp_path, "val").images()


def test_imagenet_a_has_no_tench(tmp_path):
    folders.write_wordnet(tmp_path, "imagenet-a", TENCH)
    with pytest.raises(InputError, match=f"{TENCH} is none of the 200 classes"):
        labelled_folder(tmp_path, "a").images()


@pytest.mark.parametrize(
    "content", ["[[1]", "{}", "[[1], [2]]", json.dumps([[]] * 49_999 + [[1000]]), json.dumps([1] * 50_000)]
)
def test_another_file_than_imagenet_reals(tmp_path, content):
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(InputError, match="real.json (cannot be read|is not ImageNet-Real's)"):
        real_labels(tmp_path, [])


def test_real_needs_published_names(tmp_path):
    folders.write_real(tmp_path, {})
    image = write_image(tmp_path / "val" / TENCH / "ILSVRC2012_val_00050001.JPEG", 0)
    with pytest.raises(InputError, match="00050001.JPEG: real.json goes by numbers"):
        real_labels(tmp_path, [image])


def test_no_corruption_at_all(tmp_path):
    (tmp_path / "imagenet-c/noise/gaussian_noise/1").mkdir(parents=True)
    with pytest.raises(InputError, match="imagenet-c has no CORRUPTION/SEVERITY folders, such as gaussian_noise/1"):
        corruption_folders(tmp_path)


@pytest.mark.slow
def test_imagenet_real_is_scored_as_by_timm(tmp_path):
    """On the published labels, which timm ships, and random outputs, half of them with a label of the image raised."""
    (tmp_path / "real.json").write_bytes(
        (importlib.resources.files("timm.data") / "_info/imagenet_real_labels.json").read_bytes()
    )
    paths = [tmp_path / f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    labels = real_labels(tmp_path, paths)
    theirs = RealLabelsImagenet([path.name for path in paths])
    generator, predictions = torch.Generator().manual_seed(0), []
    for start in range(0, len(paths), 1000):
        logits = torch.randn(1000, 1000, generator=generator)
        for row in range(0, 1000, 2):
            logits[row, list(labels[start + row])[:1]] += 3
        theirs.add_result(logits)
        predictions.append(top_classes(logits))
    found = score(torch.cat(predictions), labels)
    assert (found.num_files, found.num_images) == (50_000, 46_837)
    assert (found.top1, found.top5) == pytest.approx((theirs.get_accuracy(1), theirs.get_accuracy(5)))
    assert 10 < found.top1 < found.top5 < 60


def test_imagenet_9_has_nine_classes_of_several(tmp_path):
    folders.write_in9(tmp_path, "mixed_same", {151: 0, 152: 0, 7: 1, 0: 8})
    folder = labelled_folder(tmp_path, "in9-same")
    assert folder.images()[1] == [0, 8] and folder.subset is None
    right = in9_labels(tmp_path)
    assert [sorted(numbers) for numbers in right] == [[151, 152], [7], *[[]] * 6, [0]]
    assert missing_parts(tmp_path, "in9-rand") == ["bg_challenge/mixed_rand/val"]
    (tmp_path / "in_to_in9.json").unlink()
    assert missing_parts(tmp_path, "in9-same") == ["in_to_in9.json"]


@pytest.mark.parametrize("text", ["[]", "{}", json.dumps({str(number): 9 for number in range(1000)}), "no JSON"])
def test_another_file_of_imagenet_9_is_named(tmp_path, text):
    (tmp_path / "in_to_in9.json").write_text(text)
    with pytest.raises(InputError, match=r"in_to_in9\.json (is not that of|cannot be read)"):
        in9_labels(tmp_path)


def test_a_folder_that_is_none_of_the_nine_is_named(tmp_path):
    folders.write_in9(tmp_path, "original", {})
    write_image(tmp_path / "bg_challenge/original/val/09_plant/a.jpeg", 0)
    with pytest.raises(InputError, match="09_plant is none of the 9 classes"):
        labelled_folder(tmp_path, "in9").images()
