import json
from pathlib import Path

import numpy as np
import pytest

from projects_vil.data import read_dataset
from tests.projects_vil.data.other_formats import CLASSES, WRITERS

FORMATS = list(WRITERS)


@pytest.fixture
def source(shapes):
    """Contents and image folders by split; the first training image has no objects."""
    contents = {
        split: json.loads((shapes / f"annotations/instances_{split}.json").read_text()) for split in ("train", "val")
    }
    first = contents["train"]["images"][0]["id"]
    contents["train"]["annotations"] = [a for a in contents["train"]["annotations"] if a["image_id"] != first]
    return contents, {split: shapes / split for split in contents}


@pytest.fixture
def written(source, tmp_path):
    def write(name: str, *, masks: bool = False) -> Path:
        return WRITERS[name](tmp_path / "mine", *source, masks=masks)

    return write


@pytest.fixture
def read(tmp_path):
    return lambda path, **options: read_dataset(path, tmp_path / "data", **options)


def content_of(dataset, split: str) -> dict:
    return json.loads(dataset.splits[split][0].read_text())


def records(content: dict, folder: Path) -> dict:
    """Image size and objects, as class, numbers of the box and of the polygons, by the name of the image."""
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    found = {}
    for image in content["images"]:
        assert (folder / image["file_name"]).is_file()
        found[Path(image["file_name"]).name] = [(image["height"], image["width"])]
        for a in content["annotations"]:
            if a["image_id"] == image["id"]:
                numbers = (a["bbox"], a["iscrowd"], a.get("segmentation") or [])
                found[Path(image["file_name"]).name].append((names[a["category_id"]], *numbers))
    return found


# -- the same dataset in five formats --------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_boxes_are_the_same_to_the_pixel(name, source, written, read):
    dataset, (contents, images) = read(written(name)), source
    assert (dataset.format, dataset.classes, dataset.has_masks) == (name, CLASSES, False)
    assert dataset.sizes == {split: len(content["images"]) for split, content in contents.items()}
    for split, content in contents.items():
        expected = content | {"annotations": [{**a, "segmentation": []} for a in content["annotations"]]}
        assert records(content_of(dataset, split), dataset.splits[split][1]) == records(expected, images[split])
    assert [entry["id"] for entry in content_of(dataset, "val")["categories"]] == [1, 2, 3]
    assert dataset.line().startswith(f"{dataset.source} is {name}: 24 images, 3 classes, boxes; train 16, val 8")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "Pascal VOC"])
def test_polygons_are_the_same(name, source, written, read):
    dataset, (contents, images) = read(written(name, masks=True)), source
    assert dataset.has_masks and "boxes and masks" in dataset.line()
    for split, content in contents.items():
        found = records(content_of(dataset, split), dataset.splits[split][1])
        for file, (size, *objects) in records(content, images[split]).items():
            assert found[file][0] == size and len(found[file]) == len(objects) + 1
            for (label, box, crowd, polygons), one in zip(objects, found[file][1:], strict=True):
                assert (label, crowd) == (one[0], one[2])
                np.testing.assert_allclose(sum(one[3], []), sum(polygons, []), atol=0.01)
                # YOLO has one outline for an object.
                assert len(one[3]) == len(polygons) or name == "YOLO"
                # Around the outline, which lies within the box of the pixels.
                np.testing.assert_allclose(one[1], box, atol=0.3)
