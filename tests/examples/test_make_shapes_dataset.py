"""Test the synthetic dataset: valid COCO and ADE20K files that match the pixels, written atomically."""

import hashlib
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from examples.make_shapes_dataset import BACKGROUND_MAX, SHAPES_CLASSES, render_image, write_shapes_dataset
from tests.projects_vil.helpers import contents_of, error_of, message, run_tool

SMALL = {"num_train": 12, "num_val": 5, "short_side": 96, "seed": 3}
SPLITS = {"train": (12, "training"), "val": (5, "validation")}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shapes") / "data"
    write_shapes_dataset(output, **SMALL)
    return output


# -- files -----------------------------------------------------------------------------------------


def test_annotations_stay_the_same(dataset):
    """The published figures of the demo depend on the annotations."""
    digest = hashlib.sha256((dataset / "annotations/instances_train.json").read_bytes()).hexdigest()
    assert digest == "e04d03669aedd51ab4cf5ff8ed0de2456319ea10863c69817d8fccab9b21cb9f"


@pytest.mark.parametrize("split", SPLITS)
def test_annotations_agree_with_the_images(dataset, split):
    coco = COCO(dataset / "annotations" / f"instances_{split}.json")
    assert [(c["id"], c["name"]) for c in coco.dataset["categories"]] == list(enumerate(SHAPES_CLASSES, start=1))
    assert len(coco.imgs) == len(list((dataset / split).iterdir())) == SPLITS[split][0]
    for index, (image_id, image) in enumerate(sorted(coco.imgs.items())):
        pixels = cv2.imread(str(dataset / split / image["file_name"]))
        assert pixels.shape == (image["height"], image["width"], 3)
        rng = np.random.default_rng([3, list(SPLITS).index(split), index])
        _, instances = render_image(rng, short_side=96)
        annotations = coco.imgToAnns[image_id]
        assert 1 <= len(annotations) == len(instances) <= 5
        for annotation, (class_index, mask) in zip(annotations, instances, strict=True):
            rows, columns = np.nonzero(mask)
            left, top = columns.min(), rows.min()
            assert annotation["bbox"] == [left, top, columns.max() + 1 - left, rows.max() + 1 - top]
            assert (annotation["area"], annotation["category_id"]) == (mask.sum(), class_index + 1)
            # Circles are red, squares are green, and triangles are blue.
            color, background = pixels[mask].mean(axis=0), np.median(pixels, axis=(0, 1)).max()
            assert color.argmax() == 2 - class_index and color.max() > background + 30
            decoded = coco.annToMask(annotation).astype(bool)
            assert (decoded & mask).sum() / (decoded | mask).sum() > 0.95
        bright = pixels.max(axis=2) > BACKGROUND_MAX + 25
        annotated = np.any([coco.annToMask(item) for item in annotations], axis=0)
        assert (bright & annotated).sum() / (bright | annotated).sum() > 0.9


def test_a_complete_dataset_is_kept_and_another_replaced_only_with_overwrite(tmp_path):
    output = tmp_path / "data"
    write_shapes_dataset(output, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    write_shapes_dataset(output, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    assert "seed 3" in message(write_shapes_dataset, output, **SMALL | {"seed": 4})
    assert str(output) in message(write_shapes_dataset, output, task="sem_seg", **SMALL, overwrite=True)
    write_shapes_dataset(output, **SMALL | {"num_val": 2}, overwrite=True)
    assert len(list((output / "val").iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    lost = next((output / "val").iterdir())
    lost.unlink()
    assert lost.name in message(write_shapes_dataset, output, **SMALL | {"num_val": 2})


@pytest.mark.parametrize("name, overwrite", [("notes.txt", True), ("annotations/instances_val.json", False)])
def test_other_folders_are_never_changed(tmp_path, name, overwrite):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"info": {"description": "COCO 2017 Dataset"}}))
    before = contents_of(tmp_path)
    for output in (tmp_path, path, path / "deeper"):
        assert str(output) in message(write_shapes_dataset, output, **SMALL, overwrite=overwrite)
    assert contents_of(tmp_path) == before


def test_command(tmp_path):
    words = ["../examples/make_shapes_dataset.py", tmp_path / "made", "--task", "sem_seg", "--num-val", 1]
    assert "--num-train" in error_of(*words, "--num-train", 0) and not (tmp_path / "made").exists()
    assert run_tool(*words, "--num-train", 3)[0] == 0
    assert len(list((tmp_path / "made/annotations/training").glob("*.png"))) == 3


def test_label_images_agree_with_images_and_annotations(dataset, tmp_path):
    labeled = tmp_path / "labeled"
    write_shapes_dataset(labeled, task="sem_seg", **SMALL)
    assert (labeled / "classes.txt").read_text().split() == ["background", *SHAPES_CLASSES]
    for split, (number, folder) in SPLITS.items():
        images, labels = (sorted((labeled / parent / folder).iterdir()) for parent in ("images", "annotations"))
        assert [path.stem for path in images] == [path.stem for path in labels] and len(images) == number
        coco = COCO(labeled / f"instances_{split}.json")
        for image_id, image, label in zip(sorted(coco.imgs), images, labels, strict=True):
            assert image.read_bytes() == (dataset / split / image.name).read_bytes()
            pixels = cv2.imread(str(label), cv2.IMREAD_UNCHANGED)
            assert pixels.dtype == np.uint8 and {0, 1} < set(np.unique(pixels)) <= set(range(5))
            objects = np.ones_like(pixels)
            for annotation in coco.imgToAnns[image_id]:
                objects[coco.annToMask(annotation).astype(bool)] = annotation["category_id"] + 1
            # Pixels on both sides of an outline are ignored.
            known = pixels > 0
            assert 0.8 < known.mean() < 1 and (pixels == objects)[known].mean() > 0.995
