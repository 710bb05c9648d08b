import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from backbones import ConfigError
from projects_vil.data import read_dataset, register_datasets
from tests.projects_vil.data.format_writers import WRITERS, write_voc
from tests.projects_vil.helpers import error_line, message, run_tool, small_config

CLASSES = ("circle", "square", "triangle")
FORMATS = list(WRITERS)


@pytest.fixture
def source(shapes):
    """Return the contents and image folders by split. The first training image has no objects."""
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
    """Return the size and the objects (class, box, iscrowd and polygons) of each image, by file name."""
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
                # YOLO has one polygon per object.
                assert len(one[3]) == len(polygons) or name == "YOLO"
                # The box of the polygon lies slightly inside the box of the pixels.
                np.testing.assert_allclose(one[1], box, atol=0.3)


@pytest.mark.real_data
@pytest.mark.parametrize("masks", [False, True])
def test_photos_of_coco(masks, tmp_path, read):
    """The test rounds boxes to whole pixels, as in Pascal VOC, and skips crowds."""
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
    if not (root / "annotations/instances_val2017.json").is_file():
        pytest.skip("COCO is not in DETECTRON2_DATASETS")
    images, found = {split: root / f"{split}2017" for split in ("train", "val")}, {}
    contents = {split: json.loads((root / f"annotations/instances_{split}2017.json").read_text()) for split in images}
    for content in contents.values():
        content["annotations"] = [a for a in content["annotations"] if not a["iscrowd"]]
        for a in content["annotations"]:
            a["bbox"] = [float(max(round(number), 1)) for number in a["bbox"]]
    for name in FORMATS:
        if name == "Pascal VOC" and masks:
            continue
        dataset = read(WRITERS[name](tmp_path / name, contents, images, masks=masks))
        assert dataset.has_masks is masks and dataset.sizes == {"train": 80, "val": 80}
        found[name] = {split: records(content_of(dataset, split), dataset.splits[split][1]) for split in images}
    if masks:
        # The boxes enclose the polygons, and the polygons may have another order.
        assert found["LabelMe"] == found["CVAT"]
        for split in images:
            for file, (_, *objects) in found["COCO"][split].items():
                numbers = [
                    sorted(sum(sum((one[3] for one in ones), []), []))
                    for ones in (objects, found["CVAT"][split][file][1:])
                ]
                np.testing.assert_allclose(numbers[0], numbers[1], atol=0.01)
    else:
        assert all(found[name] == found["COCO"] for name in FORMATS)


# -- splits ----------------------------------------------------------------------------------------


def validated(dataset) -> set[str]:
    return {Path(image["file_name"]).name for image in content_of(dataset, "val")["images"]}


def test_a_split_by_hash_depends_on_file_names_only(source, tmp_path, read):
    contents, images = ({"train": part["train"]} for part in source)
    chosen = []
    for name in FORMATS:
        dataset = read(WRITERS[name](tmp_path / name, contents, images, masks=False), val=0.25)
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
    path = tmp_path / "COCO/annotations/instances_train2017.json"
    dataset = read(path, val=0.25)
    assert validated(dataset) == chosen[0] and dataset.splits["val"][1] == tmp_path / "COCO/train2017"
    assert read(tmp_path / "COCO", val=0).splits == {"train": (path, tmp_path / "COCO/train2017")}


def test_lists_of_images_and_test_splits(written, read, monkeypatch):
    root = written("YOLO")
    (root.parent / "val.txt").write_text("./images/val/000000000017.jpg\n\nimages/val/000000000018.jpg\n")
    root.write_text(root.read_text().replace("val: images/val", "val: val.txt\ntest: [images/val]"))
    assert read(root).sizes == {"train": 16, "val": 2, "test": 8}
    # Roboflow's paths start with ../ for a folder next to data.yaml, and the test images may be missing.
    text = root.read_text().replace("train: images", "train: ../images").replace("[images/val]", "../test/images")
    root.write_text(text)
    assert read(root.parent).sizes == {"train": 16, "val": 2}
    with pytest.raises(ConfigError, match="already has a validation split"):
        read(root, val=0.1)
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
    write_voc(tmp_path / "made", *source)
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
    assert "without annotations: 1 skipped" in dataset.line() and list(dataset.splits) == ["train", "val"]
    annotations = content_of(dataset, "val")["annotations"][-number:]
    assert [a["iscrowd"] for a in annotations] == [1] + [0] * (number - 1) and annotations[0]["bbox"][0] == 0


@pytest.mark.parametrize("name", ["Pascal VOC", "LabelMe"])
def test_files_whose_format_is_found_by_reading_all_of_them(name, written, read):
    """The signature may be in the middle of a file because of long image data or comments. XML may be UTF-16."""
    root = written(name)
    expected = {split: content_of(read(root), split) for split in ("train", "val")}
    for number, path in enumerate(sorted([*root.rglob("*.xml"), *root.rglob("*.json")])):
        text = path.read_text()
        if name == "LabelMe":
            content = json.loads(text)
            long = {"imageData": "A" * 9000, "shapes": content.pop("shapes"), "note": "A" * 9000}
            text = json.dumps(long | {key: value for key, value in content.items() if key not in long})
            path.write_text(text)
        elif number % 2:
            text = text.replace("<annotation>", f"<!-- {'a' * 9000} --><annotation>") + f"<!-- {'a' * 9000} -->"
            path.write_text(text)
        else:
            path.write_text(text, encoding="utf-16")
    assert {split: content_of(read(root), split) for split in expected} == expected


@pytest.mark.parametrize("name", ["Pascal VOC", "LabelMe"])
def test_images_with_the_same_names_in_two_splits(name, source, tmp_path, read):
    """The images of a split come from its own folder."""
    for split in ("train", "val"):
        WRITERS[name](tmp_path / "made", *({split: part[split]} for part in source), masks=False)
        (tmp_path / "made").rename(tmp_path / split)
        folder = tmp_path / "mine" / split
        (folder / "photos").mkdir(parents=True), (folder / "labels").mkdir()
        images = sorted((tmp_path / split).rglob("*.jpg"))[-8:]
        for number, image in enumerate(images):
            (label,) = [
                path for path in (tmp_path / split).rglob(f"{image.stem}.*") if path.suffix in (".xml", ".json")
            ]
            image.rename(folder / f"photos/{number}.jpg")
            text = label.read_text().replace(image.name, f"{number}.jpg")
            (folder / f"labels/{number}{label.suffix}").write_text(re.sub(r"[./\w]*/(\d\.jpg)", r"\1", text))
    dataset = read(tmp_path / "mine")
    for split in ("train", "val"):
        content, folder = content_of(dataset, split), dataset.splits[split][1]
        files = {(folder / image["file_name"]).resolve() for image in content["images"]}
        assert files == set((tmp_path / f"mine/{split}/photos").iterdir())
    # A missing image is not taken from another split, and a copy in a third folder is ambiguous.
    (tmp_path / "mine/val/photos/3.jpg").unlink()
    dataset = read(tmp_path / "mine")
    ((label,),) = dataset.unused.values()
    assert "val/labels/3." in label and dataset.sizes == {"train": 8, "val": 7}
    (tmp_path / "mine/val/other").mkdir()
    ImageOps.invert(Image.open(tmp_path / "mine/val/photos/2.jpg")).save(tmp_path / "mine/val/other/2.jpg")
    text = message(read, tmp_path / "mine")
    assert "photos/2.jpg" in text and "other/2.jpg" in text


def test_labels_beside_images_and_files_that_do_not_match(source, tmp_path, read):
    root = WRITERS["YOLO"](tmp_path / "mine", *source, masks=False).parent
    expected = content_of(read(root), "val")
    for path in (root / "labels/val").iterdir():
        path.rename(root / "images/val" / path.name)
    assert content_of(read(root), "val") == expected and "label files" not in read(root).line()
    (root / "labels/train/classes.txt").write_text("circle")
    next((root / "images/train").iterdir()).rename(root / "images/train/photo.heic")
    assert "label files without an image: 1 (first: " in read(root).line()
    root = WRITERS["LabelMe"](tmp_path / "labelme", *source, masks=False)
    next(root.rglob("*.json")).unlink()
    assert "images without an annotation file: 1 (first: " in read(root).line()


def test_skipped_shapes_are_reported(written, read):
    path = sorted(written("LabelMe", masks=True).glob("train/*.json"))[-1]
    entry = json.loads(path.read_text())
    others = [{"label": "hole", "points": [[1, 2], [3, 4]], "shape_type": kind} for kind in ("circle", "polygon")]
    others.append({"label": "__ignore__", "points": [[1, 2], [3, 4], [5, 6]]})
    box = {"label": "box", "points": [[9, 8], [3, 4]], "shape_type": "rectangle", "group_id": None}
    path.write_text(json.dumps(entry | {"shapes": [*entry["shapes"], *others, box]}))
    dataset = read(path.parents[1])
    assert "__ignore__: 1 skipped; polygon of 2 points: 1 skipped" in dataset.line()
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
    "no annotations": ("YOLO", lambda root: (root / "data.yaml").unlink(), "no annotations of a known format"),
    "two formats": ("Pascal VOC", lambda root: write_yolo_file(root), "Pascal VOC (Annotations/"),
    "a class index": ("YOLO", replace("labels/val/*.txt", "", "7 0.5 0.5 0.5 0.5\n"), "line 1: class 7"),
    "too few numbers": ("YOLO", replace("labels/val/*.txt", "", "1 0.5 0.5 0.5\n"), "line 1: 4 numbers"),
    "a wrong number of classes": ("YOLO", replace("data.yaml", "names", "nc: 4\nnames"), "has invalid 'names'"),
    "YAML": ("YOLO", replace("data.yaml", "names:", "names: ["), "data.yaml' is not YAML"),
    "no folder of images": ("YOLO", replace("data.yaml", "val: images", "val: photos"), "'photos/val' for val"),
    "no labels": ("YOLO", lambda root: (root / "labels").rename(root / "label"), "label file"),
    "XML": ("Pascal VOC", replace("Annotations/*.xml", "</size>", ""), ".xml' is not XML"),
    "an entity": ("Pascal VOC", replace("Annotations/*.xml", "<annotation>", f"{BOMB}<annotation>&a9;"), "not XML"),
    "an encoding": ("CVAT", replace("*.xml", "utf-8", "utf-99"), ".xml' is not XML"),
    "a number in VOC": ("Pascal VOC", replace("Annotations/*.xml", "<xmin>", "<xmin>x"), "xmin of"),
    "no class": ("Pascal VOC", replace("Annotations/*.xml", r"<object><name>\w+", "<object><name>"), "has no class"),
    "a listed file": ("Pascal VOC", replace("ImageSets/Main/val.txt", "^", "absent\n"), "no absent.xml"),
    "JSON": ("LabelMe", replace("val/*.json", '"label"', '"name"'), ".json' is not a valid LabelMe file"),
    "a label": ("CVAT", replace("*.xml", 'label="circle"', 'label="disc"'), "'disc'"),
    "a video": ("CVAT", replace("*.xml", "<image ", "<track/><image "), "CVAT for images"),
    "several files": ("CVAT", lambda root: shutil.copy(root / "annotations.xml", root / "b.xml"), "b.xml"),
    "an empty file in VOC": ("Pascal VOC", lambda root: empty(root, "Annotations/*.xml"), "1.xml"),
    "an empty file in LabelMe": ("LabelMe", lambda root: empty(root, "val/*.json"), "7.json"),
    "an empty file in COCO": ("COCO", lambda root: empty(root, "annotations/*val*"), "instances_val2017.json"),
    "UTF-16 in YOLO": ("YOLO", lambda root: in_utf_16(root, "labels/val/*.txt"), "7.txt, line 1"),
    "COCO without images": ("COCO", lambda root: shutil.rmtree(root / "val2017"), "instances_val2017.json"),
}  # fmt: skip


def empty(root: Path, pattern: str, content: str = "") -> None:
    min(root.glob(pattern)).write_text(content)
    shutil.rmtree(root / "ImageSets", ignore_errors=True)


def in_utf_16(root: Path, pattern: str) -> None:
    path = min(root.glob(pattern))
    path.write_text(path.read_text(), encoding="utf-16")


def write_yolo_file(root: Path) -> None:
    (root / "data.yaml").write_text("names: [a]\ntrain: .\n")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case, written, tmp_path, read):
    name, change, named = WRONG[case]
    written(name)
    change(tmp_path / "mine")
    text = message(read, tmp_path / "mine")
    assert named in text and str(tmp_path / "mine") in text


@pytest.mark.parametrize("val", [1.0, -0.1, float("nan")])
def test_invalid_validation_fractions(val, written, read):
    assert str(val) in message(read, written("LabelMe"), val=val)


# -- where datasets are named ----------------------------------------------------------------------


def test_registered_files_that_are_not_coco():
    assert "comma" in message(register_datasets, small_config("retinanet", "DATASETS.COCO", "[['a', 'b.json' 'c']]"))
    with pytest.raises(ConfigError, match="comma"):
        small_config("retinanet", "DATASETS.COCO", "[['a', 'b', 'c'] ['d', 'e', 'f']]")


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
