"""The drawn dataset: what COCO tools read from it, and that it fits its pixels."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from detectron2.data.datasets import load_coco_json
from pycocotools.coco import COCO

from backbones.utils.errors import InputError
from projects_vil.data import describe_shapes, write_shapes_dataset
from projects_vil.data.datasets.builtin_meta import SHAPES_CLASSES, SHAPES_SEM_SEG_CLASSES
from projects_vil.data.datasets.shapes import BACKGROUND_MAX, OBJECT_SIZES, draw_image, label_image, mask_polygons

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
    assert [category["name"] for category in content["categories"]] == list(SHAPES_CLASSES)
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
            assert color.argmax() == brightest_channel[SHAPES_CLASSES[class_index]]
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
    assert not summary.written and "kept" in describe_shapes(summary)
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

    monkeypatch.setattr("projects_vil.data.datasets.shapes.draw_image", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_shapes_dataset(tmp_path / "data", **SMALL)
    assert not list(tmp_path.iterdir())


# -- label images ----------------------------------------------------------------------------------

SPLIT_FOLDERS = [("train", "training", 12), ("val", "validation", 5)]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shapes") / "labelled"
    write_shapes_dataset(output, task="sem_seg", **SMALL)
    return output


@pytest.mark.parametrize("split, folder, number", SPLIT_FOLDERS)
def test_layout_of_ade20k(labelled, dataset, split, folder, number):
    assert {path.name for path in labelled.iterdir()} == {
        "images", "annotations", "classes.txt", "instances_train.json", "instances_val.json"
    }  # fmt: skip
    assert (labelled / "classes.txt").read_text().split() == list(SHAPES_SEM_SEG_CLASSES)
    images, labels = (sorted((labelled / kind / folder).iterdir()) for kind in ("images", "annotations"))
    assert [path.stem for path in images] == [path.stem for path in labels] and len(images) == number
    for image, label in zip(images, labels, strict=True):
        assert (image.suffix, label.suffix) == (".jpg", ".png")
        assert image.read_bytes() == (dataset / split / image.name).read_bytes()
        pixels = cv2.imread(str(label), cv2.IMREAD_UNCHANGED)
        assert pixels.dtype == np.uint8 and pixels.shape == cv2.imread(str(image)).shape[:2]
        assert set(np.unique(pixels)) <= set(range(5)) and {0, 1} < set(np.unique(pixels))


@pytest.mark.parametrize("split, folder, number", SPLIT_FOLDERS)
def test_labels_agree_with_the_boxes_file(labelled, split, folder, number):
    coco = COCO(labelled / f"instances_{split}.json")
    for image_id, image in coco.imgs.items():
        labels = cv2.imread(str(labelled / "annotations" / folder / image["file_name"]).replace(".jpg", ".png"), -1)
        objects = np.ones_like(labels)
        for annotation in coco.imgToAnns[image_id]:
            objects[coco.annToMask(annotation).astype(bool)] = annotation["category_id"] + 1
        known = labels > 0
        assert 0.8 < known.mean() < 1
        assert (labels == objects)[known].mean() > 0.995


def test_outlines_are_ignored_on_both_sides():
    mask = np.zeros((12, 17), bool)
    mask[3:9, 4:13] = True
    labels = label_image((12, 17), [(2, mask)])
    assert set(labels[4:8, 5:12].ravel()) == {4}
    assert not labels[2:10, [3, 4, 12, 13]].any() and not labels[[2, 3, 8, 9], 3:14].any()
    assert labels[0].all() and labels[:, 0].all() and set(labels[11]) == {1}


def test_label_images_are_written_once_and_named_when_missing(labelled, tmp_path):
    assert "kept" in describe_shapes(write_shapes_dataset(labelled, task="sem_seg", **SMALL))
    write_shapes_dataset(tmp_path / "data", task="sem_seg", **SMALL)
    (tmp_path / "data/annotations/training/000000000002.png").unlink()
    with pytest.raises(InputError, match="annotations/training lacks 1 label images; .*--overwrite"):
        write_shapes_dataset(tmp_path / "data", task="sem_seg", **SMALL)
    assert write_shapes_dataset(tmp_path / "data", task="sem_seg", overwrite=True, **SMALL).written


@pytest.mark.parametrize("first, second", [("detection", "sem_seg"), ("sem_seg", "detection")])
def test_a_dataset_of_the_other_task_is_never_touched(tmp_path, first, second):
    write_shapes_dataset(tmp_path / "data", task=first, **SMALL)
    with pytest.raises(InputError, match="choose another folder"):
        write_shapes_dataset(tmp_path / "data", task=second, overwrite=True, **SMALL)


def test_unknown_task(tmp_path):
    with pytest.raises(InputError, match="unknown --task 'semseg'.*did you mean 'sem_seg'"):
        write_shapes_dataset(tmp_path / "data", task="semseg", **SMALL)
