"""Test the notes about images that are in several splits, and about classes that only one split has."""

import json
import shutil

from projects_vil.data import read_dataset


def test_images_and_classes_of_splits_are_compared(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "mine")
    assert read_dataset(tmp_path / "mine", tmp_path / "out").notes == ()
    path = tmp_path / "mine/annotations/instances_val.json"
    content = json.loads(path.read_text())
    for number, image in enumerate(content["images"][:2]):
        shutil.copy(tmp_path / f"mine/train/{number + 1:012d}.jpg", tmp_path / "mine/val" / image["file_name"])
    used = {one["id"]: one["name"] for one in content["categories"]}
    content["annotations"] = [one for one in content["annotations"] if used[one["category_id"]] != "square"]
    path.write_text(json.dumps(content))
    shared, classes = read_dataset(tmp_path / "mine", tmp_path / "out").notes
    assert (
        shared.startswith("images in several splits, whose AP is too high: 2, such as ")
        and "in train" in shared
        and "in val" in shared
    )
    assert classes == "only one split has objects of 'square' (train)"
    # The same files are in two splits.
    shutil.copy(tmp_path / "mine/annotations/instances_train.json", tmp_path / "mine/train/val.json")
    shutil.copy(tmp_path / "mine/annotations/instances_train.json", tmp_path / "mine/train/train.json")
    (note,) = read_dataset(tmp_path / "mine/train", tmp_path / "out").notes
    assert note.startswith("images in several splits, whose AP is too high: 16,")
