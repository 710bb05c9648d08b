"""Test that datasets in all formats are read as they were written, in folders and with faults of many kinds."""

import json
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as mask_util

from projects_vil.data import convert_dataset, read_dataset, register_datasets
from projects_vil.data.segmentation import rle_of
from projects_vil.data.writers import write_dataset, write_detections
from tests.projects_vil.helpers import error_line, message, run_tool, small_config
from tests.projects_vil.inference.helpers import picture, run_on
from vil.cli import _main as run

CLASSES = ("circle", "square", "triangle")
NAMES = {"COCO": "coco", "YOLO": "yolo", "Pascal VOC": "voc", "LabelMe": "labelme", "CVAT": "cvat"}
FORMATS = list(NAMES)


@pytest.fixture
def source(shapes):
    """Return the contents and image folders by split. The first training image has no objects."""
    files = {split: shapes / f"annotations/instances_{split}.json" for split in ("train", "val")}
    contents = {split: json.loads(file.read_text()) for split, file in files.items()}
    first = contents["train"]["images"][0]["id"]
    contents["train"]["annotations"] = [a for a in contents["train"]["annotations"] if a["image_id"] != first]
    return contents, {split: shapes / split for split in contents}


def write(root: Path, contents: dict, images: dict, name: str, *, masks: bool = False) -> Path:
    kept = {} if masks else {"segmentation": []}
    parts = {
        split: (content | {"annotations": [one | kept for one in content["annotations"]]}, images[split])
        for split, content in contents.items()
    }
    write_dataset(parts, root, NAMES[name])
    return root


@pytest.fixture
def written(source, tmp_path):
    return lambda name, **options: write(tmp_path / "mine", *source, name, **options)


@pytest.fixture
def read(tmp_path):
    return lambda path, **options: read_dataset(path, tmp_path / "data", **options)


def content_of(dataset, split: str) -> dict:
    return json.loads(dataset.splits[split][0].read_text())


def objects_of(content: dict, folder: Path, *, crowds: bool = True) -> dict:
    """Return the size and the objects (class, iscrowd, box and polygons) of each image, by file name."""
    names, found = {entry["id"]: entry["name"] for entry in content["categories"]}, {}
    objects = defaultdict(list)
    for one in content["annotations"]:
        if crowds or not one["iscrowd"]:
            entry = names[one["category_id"]], one["iscrowd"], one["bbox"], one.get("segmentation") or []
            objects[one["image_id"]].append(entry)
    for image in content["images"]:
        assert (folder / image["file_name"]).is_file()
        found[Path(image["file_name"]).name] = (image["height"], image["width"]), objects[image["id"]]
    return found


def assert_equal(found: dict, expected: dict, *, joined: bool = False, masks: bool = False) -> None:
    """Check that all objects are equal to 0.01 pixels. The box of a polygon may differ from the annotated box."""
    assert found.keys() == expected.keys()
    for name, (size, objects) in expected.items():
        assert found[name][0] == size and len(found[name][1]) == len(objects)

        def order(one) -> list:
            return [one[0], *(sum(one[3], [])[:6] if masks else np.round(one[2], 1))]

        pairs = zip(sorted(found[name][1], key=order), sorted(objects, key=order), strict=True)
        for one, other in pairs if masks else zip(found[name][1], objects, strict=True):
            assert one[:2] == other[:2]
            if not masks:
                np.testing.assert_allclose(one[2], other[2], atol=0.0101)
            elif not joined or len(other[3]) == 1:
                assert list(map(len, one[3])) == list(map(len, other[3]))
                np.testing.assert_allclose(sum(one[3], []), sum(other[3], []), atol=0.0101)
            else:
                # YOLO has one polygon per object. It has the corners of all parts.
                corners = [{(round(x), round(y)) for x, y in np.reshape(sum(o[3], []), (-1, 2))} for o in (one, other)]
                assert len(one[3]) == 1 and len(corners[0] ^ corners[1]) <= 0.1 * len(corners[1])


# -- the same dataset in five formats --------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_boxes_are_equal(name, source, written, read):
    dataset, (contents, images) = read(written(name)), source
    assert (dataset.format, dataset.classes, dataset.has_masks) == (name, CLASSES, False)
    for split, content in contents.items():
        expected = objects_of(content, images[split])
        assert_equal(objects_of(content_of(dataset, split), dataset.splits[split][1]), expected)
    assert [entry["id"] for entry in content_of(dataset, "val")["categories"]] == [1, 2, 3]
    assert dataset.line() == f"{dataset.source} is {name}: 24 images, 3 classes, boxes; train 16, val 8"


@pytest.mark.real_data
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("folder", ["coco", "raccoon"])
def test_photos_are_equal(folder, name, masks, tmp_path, read):
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / folder
    if not root.is_dir():
        pytest.skip(f"{folder} is not in DETECTRON2_DATASETS")
    if masks and (name == "Pascal VOC" or folder == "raccoon"):
        pytest.skip("Pascal VOC has no masks")
    original = read_dataset(root, tmp_path / "original", val=0)
    contents = {split: json.loads(path.read_text()) for split, (path, _) in original.splits.items()}
    images = {split: folder for split, (_, folder) in original.splits.items()}
    dataset = read(write(tmp_path / "out", contents, images, name, masks=masks), val=0)
    assert dataset.has_masks is masks and dataset.sizes == original.sizes
    for split, content in contents.items():
        found = objects_of(content_of(dataset, split), dataset.splits[split][1], crowds=False)
        assert_equal(found, objects_of(content, images[split], crowds=False), joined=name == "YOLO", masks=masks)
        if name in ("COCO", "Pascal VOC"):
            crowds = [sum(one["iscrowd"] for one in c["annotations"]) for c in (content, content_of(dataset, split))]
            assert crowds[0] == crowds[1]


PARTS = [[[10.25, 20.5, 40.375, 20.5, 40.375, 60.5], [50, 61, 52, 61, 52, 62.125], [5, 5, 9, 5, 9, 8]]]
PARTS += [[[1, 1, 6, 1, 6, 6, 1, 6]], []]


@pytest.mark.parametrize("name", FORMATS)
def test_names_and_shapes_of_many_kinds(name, tmp_path, read):
    """Equal names in folders, other alphabets, several parts, holes, crowds, and classes and images without objects."""
    names = ["day1/a.jpg", "day2/a.jpg", "day2/a.png", "b/../caf\u00e9 #1.JPG", "my photo.b.jpg", "day1/A.jpg"]
    for number, file in enumerate(names):
        (tmp_path / "photos" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (200, 100), number).save(tmp_path / "photos" / file)
    ring = np.zeros((100, 200), np.uint8, order="F")
    ring[10:50, 20:80], ring[20:30, 30:40], ring[50:55, 80:90] = 1, 0, 1
    rle = mask_util.encode(ring) | {"size": [100, 200]}
    segmentations = [*PARTS, rle | {"counts": rle["counts"].decode()}]
    boxes = [[5, 5, 47, 57.125], [1, 1, 5, 5], [0.5, 1.25, 3, 4], [20, 10, 70, 45]]
    annotations = [
        {"image_id": image, "category_id": 3 + 4 * (image % 2), "bbox": box, "segmentation": polygons, "iscrowd": 0}
        for image in range(5)
        for box, polygons in zip(boxes, segmentations, strict=True)
    ]
    annotations.append(annotations[1] | {"iscrowd": 1})
    content = {
        "images": [{"id": i, "file_name": file, "height": 100, "width": 200} for i, file in enumerate(names)],
        "annotations": [one | {"id": i, "area": 9.0} for i, one in enumerate(annotations, start=1)],
        "categories": [{"id": 9, "name": "none"}, {"id": 3, "name": "K\u00e4fer, gro\u00df"}, {"id": 7, "name": "on"}],
    }
    lines = write_dataset({"train": (content, tmp_path / "photos")}, tmp_path / "mine", NAMES[name])
    dataset = read(tmp_path / "mine", val=0)
    found = content_of(dataset, "train")
    assert len(found["images"]) == 6 and {*dataset.classes} - {"none"} == {"K\u00e4fer, gro\u00df", "on"}
    assert ("none" in dataset.classes) == (name in ("COCO", "YOLO", "CVAT"))
    assert any("crowd" in line for line in lines) == (name in ("YOLO", "LabelMe", "CVAT"))
    own = objects_of(found, dataset.splits["train"][1], crowds=False)
    for file, (_, objects) in own.items():
        with Image.open(dataset.splits["train"][1] / file) as image:
            number = image.getpixel((0, 0))
        assert len(objects) == (0 if number == 5 else 4)
        for label, _, box, polygons in objects:
            assert label == ("on" if number % 2 else "K\u00e4fer, gro\u00df")
            index = min(range(4), key=lambda index: np.abs(np.subtract(boxes[index], box)).sum())
            np.testing.assert_allclose(box, boxes[index], atol=0.0101)
            if index == 3 and name != "Pascal VOC":
                assert (mask_util.decode(rle_of(polygons, 100, 200)) == ring).all()
            elif name in ("COCO", "LabelMe", "CVAT") or index > 0:
                assert polygons == (PARTS[index] if name != "Pascal VOC" else [])
            elif name == "YOLO":
                assert len(polygons) == 1 and len(polygons[0]) == 18 + 6 + 2


def test_detections_are_written_with_scores(tmp_path, read):
    Image.new("L", (200, 100)).save(tmp_path / "a.jpg")
    disk = np.hypot(*np.ogrid[-50:50, -80:120]) < 30
    rle = mask_util.encode(np.asfortranarray(disk.astype(np.uint8)))
    results = [{"image_id": 1, "category_id": 1, "bbox": [50.0, 20.0, 59.0, 59.0], "score": 0.75, "segmentation": rle}]
    entry = {"id": 1, "file_name": "a.jpg", "height": 100, "width": 200}
    for name in FORMATS:
        write_detections([(entry, results)], [{"id": 1, "name": "cat"}], tmp_path, tmp_path / name, NAMES[name])
        (one,) = content_of(read(tmp_path / name, val=0), "train")["annotations"]
        texts = [path.read_text() for path in (tmp_path / name).rglob("*.*") if path.suffix in (".json", ".xml")]
        assert any("0.75" in text for text in texts) == (name in ("COCO", "LabelMe", "CVAT"))
        np.testing.assert_allclose(one["bbox"], results[0]["bbox"], atol=2)
        if name != "Pascal VOC":
            (points,) = one["segmentation"]
            assert 16 <= len(points) < 80 and abs(one["area"] - disk.sum()) < 0.05 * disk.sum()
    assert "already exists" in message(write_detections, [(entry, results)], [], tmp_path, tmp_path / name, "cvat")


def test_commands(written, tmp_path, capsys, read):
    """Predict, correct and train, and convert a dataset with errors."""
    written("YOLO")
    run(["convert-dataset", str(tmp_path / "mine"), str(tmp_path / "cvat"), "--format", "cvat"])
    assert "wrote" in capsys.readouterr().out
    assert read(tmp_path / "cvat").sizes == {"train": 16, "val": 8}
    (tmp_path / "mine/images/val/000000000017.jpg").write_bytes(b"")
    text = message(convert_dataset, tmp_path / "mine", tmp_path / "voc", "voc")
    assert "vil check" in text and not (tmp_path / "voc").exists()
    (tmp_path / "in/day1").mkdir(parents=True)
    for name in ("a.png", "day1/a.png"):
        Image.fromarray(picture(40, 60)).save(tmp_path / "in" / name)
    summary = run_on(tmp_path / "in", tmp_path / "out", save_labels="labelme")
    assert f"wrote {tmp_path / 'out/dataset'}: 2 images in format labelme" in summary.lines
    dataset = read(tmp_path / "out/dataset", val=0)
    assert dataset.sizes == {"train": 2} and dataset.classes == ("left",)
    assert [one["bbox"] for one in content_of(dataset, "train")["annotations"]] == [[0, 0, 30, 40]] * 2
    # Corrected labels are not overwritten, and other inputs have no image files.
    assert "dataset' already exists" in message(run_on, tmp_path / "in", tmp_path / "out", save_labels="yolo")
    run_on(tmp_path / "in/a.png", tmp_path / "b", save_labels="coco", score_threshold=0.9)
    content = json.loads((tmp_path / "b/dataset/annotations/instances_train.json").read_text())
    assert len(content["images"]) == 1 and not content["annotations"]
    (tmp_path / "list.txt").write_text("in/a.png")
    assert "--save-labels" in message(run_on, tmp_path / "list.txt", tmp_path / "c", save_labels="yolo")
    (tmp_path / "in/b.tar").touch()
    assert "tar files" in message(run_on, tmp_path / "in", tmp_path / "c", save_labels="yolo")


# -- splits ----------------------------------------------------------------------------------------


def validated(dataset) -> set[str]:
    return {Path(image["file_name"]).name for image in content_of(dataset, "val")["images"]}


def test_a_split_by_hash_depends_on_file_names_only(source, tmp_path, read, monkeypatch):
    contents, images = ({"train": part["train"]} for part in source)
    chosen = []
    for name in FORMATS:
        dataset = read(write(tmp_path / name, contents, images, name), val=0.25)
        assert dataset.sizes == {"train": 12, "val": 4} and "hash" in dataset.line()
        chosen.append(validated(dataset))
        before = [dataset.splits[split][0].read_bytes() for split in dataset.splits]
        again = read(dataset.source, val=0.25)
        assert [again.splits[split][0].read_bytes() for split in again.splits] == before
    assert all(names == chosen[0] for names in chosen)
    # If the order changes or images are removed, most images stay in the same split.
    folder = tmp_path / "LabelMe/train"
    folder.rename(tmp_path / "LabelMe/0")
    next(iter(sorted((tmp_path / "LabelMe/0").glob("*.json")))).unlink()
    assert len(validated(read(tmp_path / "LabelMe", val=0.25)) & chosen[0]) >= 3
    assert read(tmp_path / "CVAT").sizes == {"train": 13, "val": 3}
    assert read(tmp_path / "YOLO", val=0).sizes == {"train": 16}
    # A single COCO file is split too, and its images are not copied.
    path = tmp_path / "COCO/annotations/instances_train.json"
    dataset = read(path, val=0.25)
    assert validated(dataset) == chosen[0] and dataset.splits["val"][1] == tmp_path / "COCO/images/train"
    assert read(tmp_path / "COCO", val=0).splits == {"train": (path, tmp_path / "COCO/images/train")}
    # The objects of a large file are stored as bytes.
    files = [dataset.splits[split][0].read_bytes() for split in dataset.splits]
    monkeypatch.setattr("projects_vil.files.LARGE_FILE", 0)
    monkeypatch.setattr("projects_vil.files._PART", 1)
    dataset = read(path, val=0.25)
    assert [dataset.splits[split][0].read_bytes() for split in dataset.splits] == files


def test_lists_of_images_and_test_splits(written, read, monkeypatch):
    root = written("YOLO") / "data.yaml"
    (root.parent / "val.txt").write_text("./images/val/000000000017.jpg\n\nimages/val/000000000018.jpg\n")
    root.write_text(root.read_text().replace("val: images/val", "val: val.txt\ntest: [images/val]"))
    assert read(root).sizes == {"train": 16, "val": 2, "test": 8}
    # Roboflow's paths start with ../ for a folder next to data.yaml, and the test images may be missing.
    text = root.read_text().replace("train: images", "train: ../images").replace("[images/val]", "../test/images")
    root.write_text(text)
    assert read(root.parent).sizes == {"train": 16, "val": 2}
    assert "already has a validation split" in message(read, root, val=0.1)
    monkeypatch.chdir(root.parent)
    assert read("data.yaml").sizes == read(".").sizes == {"train": 16, "val": 2}


# -- variants of the formats -----------------------------------------------------------------------


def test_files_of_one_folder_per_split(source, tmp_path, read):
    """Roboflow's COCO export and labelImg's Pascal VOC files have the annotations next to the images."""
    contents, images = source
    for split, folder in {"train": "train", "val": "valid"}.items():
        for name in ("coco", "voc"):
            shutil.copytree(images[split], tmp_path / name / folder)
        (tmp_path / "coco" / folder / "_annotations.coco.json").write_text(json.dumps(contents[split]))
    write(tmp_path / "made", *source, "Pascal VOC")
    for path in (tmp_path / "made/Annotations").iterdir():
        folder = "valid" if (tmp_path / f"voc/valid/{path.stem}.jpg").exists() else "train"
        # The file name in the annotation is outdated.
        text = path.read_text().replace(f"{path.stem}.jpg", "IMG_1.JPG")
        (tmp_path / "voc" / folder / path.name).write_text(text)
    coco, voc = read(tmp_path / "coco"), read(tmp_path / "voc")
    assert coco.sizes == voc.sizes == {"train": 16, "val": 8}
    assert coco.splits["val"] == (tmp_path / "coco/valid/_annotations.coco.json", tmp_path / "coco/valid")
    boxes = [[a["bbox"] for a in content_of(dataset, "val")["annotations"]] for dataset in (coco, voc)]
    assert boxes[0] == boxes[1]
    # An annotation file with another name than its image. Files of a training run in the dataset folder are ignored.
    first = next((tmp_path / "made/Annotations").glob("*.xml"))
    first.rename(first.with_stem("first"))
    (tmp_path / "made/run").mkdir()
    (tmp_path / "made/run/log.txt").touch()
    shutil.rmtree(tmp_path / "made/ImageSets")
    for _ in range(2):
        dataset = read_dataset(tmp_path / "made/Annotations", tmp_path / "made/run/data")
        names = {
            Path(image["file_name"]).stem for split in dataset.splits for image in content_of(dataset, split)["images"]
        }
        assert len(names) == 24 and first.stem in names


def test_difficult_objects_are_not_counted(written, read):
    """Difficult objects become crowds, boxes at the border stay in the image, and test images need no labels."""
    root = written("Pascal VOC")
    (root / "ImageSets/Main/test.txt").write_text("absent\n")
    path = sorted((root / "Annotations").iterdir())[-1]
    number = path.read_text().count("<object>")
    text = path.read_text().replace("<difficult>0", "<difficult>1", 1)
    path.write_text(re.sub(r"<xmin>\d+", "<xmin>0", text, count=1))
    dataset = read(root)
    assert "without annotations: 1 (first: " in dataset.line() and list(dataset.splits) == ["train", "val"]
    annotations = content_of(dataset, "val")["annotations"][-number:]
    assert [a["iscrowd"] for a in annotations] == [1] + [0] * (number - 1) and annotations[0]["bbox"][0] == 0


def test_labels_beside_images_and_files_that_do_not_match(source, tmp_path, read):
    root = write(tmp_path / "mine", *source, "YOLO")
    expected = content_of(read(root), "val")
    for path in (root / "labels/val").iterdir():
        path.rename(root / "images/val" / path.name)
    assert content_of(read(root), "val") == expected and "label files" not in read(root).line()
    (root / "labels/train/classes.txt").write_text("circle")
    min((root / "images/train").iterdir()).rename(root / "images/train/photo.heic")
    assert "label files whose image is missing: 1 (first: " in read(root).line()
    (root / "data.yaml").write_text((root / "data.yaml").read_text().replace("val: images/val", "val: images/train"))
    max((root / "labels/train").glob("[0-9]*.txt")).write_text("0 30 20 9 9")
    assert re.search("(?s)values larger than 1, .*files that are not used: 8 .first: ", read(root).line())


def test_skipped_shapes_are_reported(written, read):
    path = sorted(written("LabelMe", masks=True).glob("train/*.json"))[-1]
    entry = json.loads(path.read_text())
    others = [{"label": "hole", "points": [[1, 2], [3, 4]], "shape_type": kind} for kind in ("circle", "polygon")]
    others += [{"label": label, "points": [[1, 2], [3, 4], [5, 6]]} for label in ("__ignore__", None)]
    box = {"label": "box", "points": [[9, 8], [3, 4]], "shape_type": "rectangle", "group_id": None}
    path.write_text(json.dumps(entry | {"shapes": [*entry["shapes"], *others, box]}))
    dataset = read(path.parents[1])
    skipped = re.findall(r"skipped (\w[\w ]*): 1 \(first: \S+\.json\)", dataset.line())
    assert skipped == ["__ignore__", "objects without a class", "polygon of 2 points"]
    # The masks stay, and the circle is a polygon. The check gives the rectangle a mask.
    assert dataset.classes == ("box", *CLASSES[:1], "hole", *CLASSES[1:]) and dataset.has_masks
    (found,) = [a for a in content_of(dataset, "train")["annotations"] if a["category_id"] == 1]
    assert (found["image_id"], found["bbox"], found["area"]) == (16, [3, 4, 6, 4], 24) and "segmentation" not in found
    assert "71 of 72 objects have masks, so" in dataset.line()


# -- errors ----------------------------------------------------------------------------------------


def replace(pattern: str, old: str, new: str):
    """Return a function that replaces a regular expression in the last matching file of a folder."""

    def change(root: Path) -> None:
        path = sorted(root.glob(pattern))[-1]
        text = re.sub(old, new, path.read_text(), count=1)
        assert text != path.read_text()
        path.write_text(text)

    return change


BOMB = '<!DOCTYPE a [<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10)) + "]>"
WRONG = {
    "no annotations": ("YOLO", lambda root: (root / "data.yaml").unlink(), "no name for class"),
    "two formats": ("Pascal VOC", lambda root: (root / "data.yaml").write_text("names: []\ntrain: ."), "Pascal VOC ("),
    "no labels": ("YOLO", lambda root: shutil.rmtree(root / "labels"), "label file"),
    "an entity": ("Pascal VOC", replace("Annotations/*.xml", "<annotation>", f"{BOMB}<annotation>&a9;"), "not XML"),
    "an empty file in VOC": ("Pascal VOC", lambda root: empty(root, "Annotations/*.xml"), "1.xml"),
    "an empty file in LabelMe": ("LabelMe", lambda root: empty(root, "val/*.json"), "7.json"),
    "an empty file in COCO": ("COCO", lambda root: empty(root, "annotations/*val*"), "instances_val.json"),
    "COCO without images": ("COCO", lambda root: shutil.rmtree(root / "images/val"), "instances_val.json"),
}  # fmt: skip


def empty(root: Path, pattern: str) -> None:
    min(root.glob(pattern)).write_text("")
    shutil.rmtree(root / "ImageSets", ignore_errors=True)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case, written, tmp_path, read):
    name, change, named = WRONG[case]
    written(name)
    change(tmp_path / "mine")
    text = message(read, tmp_path / "mine")
    assert named in text and str(tmp_path / "mine") in text


# -- where datasets are named ----------------------------------------------------------------------


def test_registered_files_that_are_not_coco():
    assert "comma" in message(register_datasets, small_config("retinanet", "DATASETS.COCO", "[['a', 'b.json' 'c']]"))
    assert "comma" in message(small_config, "retinanet", "DATASETS.COCO", "[['a', 'b', 'c'] ['d', 'e', 'f']]")


@pytest.mark.parametrize("name", FORMATS)
def test_the_check_reads_and_fixes_any_format(name, written, read, tmp_path):
    written(name)
    images = sorted((tmp_path / "mine").rglob("*.jpg"))
    (tmp_path / "mine" / images[-1]).unlink()
    (tmp_path / "mine" / images[-2]).write_bytes(b"")
    command = ["check_dataset.py", tmp_path / "mine", "--json", tmp_path / "found.json"]
    result = run_tool(*command)
    assert "--fix" in error_line(result) and f"mine is {name}: " in result.stdout
    found = {one["name"]: one for one in json.loads((tmp_path / "found.json").read_text())["splits"]["val"]["found"]}
    # COCO lists its images. The other formats have an annotation without an image.
    assert found["unreadable_image_file"]["count"] == 1 and ("missing_image_file" in found) == (name == "COCO")
    assert name == "COCO" or ": 1 (first: " in result.stdout
    result = run_tool(*command, "--fix", tmp_path / "fixed")
    assert result.returncode == 0, result.stderr
    dataset = read(tmp_path / "fixed")
    assert dataset.format == "COCO" and dataset.sizes == {"train": 16, "val": 6}
    assert run_tool("check_dataset.py", tmp_path / "fixed").returncode == 0
