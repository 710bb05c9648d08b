"""The drawn dataset: what COCO tools read from it, and that it fits its pixels."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from detectron2.data.datasets import load_coco_json
from pycocotools.coco import COCO

from backbones.errors import InputError
from projects_vil.shapes import (
    BACKGROUND_MAX,
    CLASS_NAMES,
    OBJECT_SIZES,
    describe,
    draw_image,
    mask_polygons,
    write_shapes_dataset,
)

SMALL = {"num_train": 12, "num_val": 5, "short_side": 96, "seed": 3}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shapes") / "data"
    write_shapes_dataset(output, **SMALL)
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def annotation_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def load(folder: Path, split: str) -> COCO:
    return COCO(annotation_file(folder, split))


def images_and_masks():
    for index in range(60):
        yield draw_image(np.random.default_rng([7, index]), short_side=110)


@pytest.mark.parametrize("split, num_images", [("train", 12), ("val", 5)])
def test_is_complete_coco(dataset, split, num_images):
    coco = load(dataset, split)
    content = coco.dataset
    assert {"info", "licenses", "images", "annotations", "categories"} == content.keys()
    assert [category["name"] for category in content["categories"]] == list(CLASS_NAMES)
    assert [category["id"] for category in content["categories"]] == [1, 2, 3]
    assert len(content["images"]) == len(list((dataset / split).iterdir())) == num_images
    required = {"id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"}
    assert all(annotation.keys() == required for annotation in content["annotations"])
    assert len({annotation["id"] for annotation in content["annotations"]}) == len(content["annotations"])
    for image in content["images"]:
        pixels = cv2.imread(str(dataset / split / image["file_name"]))
        assert pixels.shape == (image["height"], image["width"], 3)
        assert 1 <= len(coco.imgToAnns[image["id"]]) <= 5


def test_detectron2_loads_every_object(dataset):
    records = load_coco_json(str(annotation_file(dataset, "train")), str(dataset / "train"))
    coco = load(dataset, "train")
    assert len(records) == 12
    assert sum(len(record["annotations"]) for record in records) == len(coco.anns)
    assert {item["category_id"] for record in records for item in record["annotations"]} == {1, 2, 3}


def test_annotations_match_their_polygons(dataset):
    for annotation in load(dataset, "train").anns.values():
        corners = np.concatenate([np.reshape(part, (-1, 2)) for part in annotation["segmentation"]])
        left, top, width, height = annotation["bbox"]
        np.testing.assert_allclose(corners.min(axis=0), [left, top], atol=0.6)
        np.testing.assert_allclose(corners.max(axis=0), [left + width, top + height], atol=0.6)


def test_union_of_polygons_is_what_the_jpeg_shows(dataset):
    coco = load(dataset, "train")
    for image_id, image in coco.imgs.items():
        pixels = cv2.imread(str(dataset / "train" / image["file_name"]))
        bright = pixels.max(axis=2) > BACKGROUND_MAX + 25
        annotated = np.any([coco.annToMask(item) for item in coco.imgToAnns[image_id]], axis=0)
        assert (bright & annotated).sum() / (bright | annotated).sum() > 0.9


def test_polygons_match_drawn_pixels():
    coco = COCO()
    for image, instances in images_and_masks():
        height, width = image.shape[:2]
        coco.imgs = {1: {"height": height, "width": width}}
        for _, mask in instances:
            decoded = coco.annToMask({"image_id": 1, "segmentation": mask_polygons(mask)}).astype(bool)
            assert (decoded & mask).sum() / (decoded | mask).sum() > 0.95


def test_boxes_enclose_pixels_tightly(dataset):
    coco = load(dataset, "val")
    for index, (image_id, image) in enumerate(sorted(coco.imgs.items())):
        drawn, instances = draw_image(np.random.default_rng([3, 1, index]), short_side=96)
        assert drawn.shape[:2] == (image["height"], image["width"])
        annotations = coco.imgToAnns[image_id]
        assert len(annotations) == len(instances)
        for annotation, (class_index, mask) in zip(annotations, instances, strict=True):
            rows, columns = np.nonzero(mask)
            left, top = columns.min(), rows.min()
            size = [columns.max() + 1 - left, rows.max() + 1 - top]
            assert annotation["bbox"] == [left, top, *size]
            assert annotation["area"] == mask.sum()
            assert annotation["category_id"] == class_index + 1


def test_classes_differ_in_hue_and_lie_above_the_background():
    brightest_channel = {"circle": 2, "square": 1, "triangle": 0}
    for image, instances in images_and_masks():
        background = ~np.any([mask for _, mask in instances], axis=0)
        for class_index, mask in instances:
            color = image[mask].mean(axis=0)
            assert color.argmax() == brightest_channel[CLASS_NAMES[class_index]]
            assert color.max() > image[background].max(axis=1).mean() + 30
        assert image[background].std() > 3


def test_sizes_vary_and_height_is_never_width():
    shapes, extents = [], []
    for image, instances in images_and_masks():
        short = min(image.shape[:2])
        shapes.append(image.shape[:2])
        extents += [max(np.ptp(axis) + 1 for axis in np.nonzero(mask)) / short for _, mask in instances]
        assert 0.9 * 110 - 1 <= short <= 1.1 * 110 + 1
    assert all(height != width for height, width in shapes)
    assert {height > width for height, width in shapes} == {True, False}
    assert len(set(shapes)) > 50
    assert max(extents) < OBJECT_SIZES[1] + 0.03
    assert min(extents) < 0.2 and np.mean(extents) > 0.25


def test_same_seed_same_bytes_other_seed_other_images(dataset, tmp_path):
    write_shapes_dataset(tmp_path / "again", **SMALL)
    write_shapes_dataset(tmp_path / "other", **SMALL | {"seed": 4})
    again, other, first = contents(tmp_path / "again"), contents(tmp_path / "other"), contents(dataset)
    assert again == first
    assert other.keys() == first.keys()
    assert not set(other.values()) & set(first.values())


def test_train_and_val_share_no_image(dataset):
    train, val = load(dataset, "train"), load(dataset, "val")
    assert not train.imgs.keys() & val.imgs.keys()
    files = [path.read_bytes() for path in dataset.rglob("*.jpg")]
    assert len(files) == len(set(files)) == 17


def test_keeps_the_same_dataset(dataset):
    before = {path: path.stat().st_mtime_ns for path in dataset.rglob("*")}
    summary = write_shapes_dataset(dataset, **SMALL)
    assert not summary.written and "kept" in describe(summary)
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*")} == before


def test_replaces_another_shapes_dataset_only_when_told(tmp_path):
    output = tmp_path / "data"
    write_shapes_dataset(output, **SMALL)
    with pytest.raises(InputError, match="seed 3; replace it with --overwrite"):
        write_shapes_dataset(output, **SMALL | {"seed": 4})
    summary = write_shapes_dataset(output, **SMALL | {"num_val": 2}, overwrite=True)
    assert summary.written and summary.num_images == {"train": 12, "val": 2}
    assert len(list((output / "val").iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_names_missing_images(tmp_path):
    write_shapes_dataset(tmp_path / "data", **SMALL)
    (tmp_path / "data" / "train" / "000000000002.jpg").unlink()
    with pytest.raises(InputError, match="train lacks 1 images; .*--overwrite"):
        write_shapes_dataset(tmp_path / "data", **SMALL)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "annotations/instances_val.json"])
def test_never_touches_foreign_folders(tmp_path, name, overwrite):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"info": {"description": "COCO 2017 Dataset"}}))
    with pytest.raises(InputError, match="choose another folder"):
        write_shapes_dataset(tmp_path, **SMALL, overwrite=overwrite)
    assert list(contents(tmp_path)) == [name]


@pytest.mark.parametrize("below", ["", "deeper"])
def test_output_at_a_file(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file"):
        write_shapes_dataset(tmp_path / "file" / below, **SMALL)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "option, value",
    [("num_train", 0), ("num_val", -1), ("short_side", 8), ("short_side", 99999), ("seed", -1)],
)
def test_refuses_values_out_of_range(tmp_path, option, value):
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} is {value}"):
        write_shapes_dataset(tmp_path / "data", **SMALL | {option: value})
    assert not (tmp_path / "data").exists()


def test_leaves_nothing_behind_when_interrupted(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("projects_vil.shapes.draw_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shapes_dataset(tmp_path / "data", **SMALL)
    assert not list(tmp_path.iterdir())
