"""Datasets as people really have them: moved, renamed, copied and encoded in many ways."""

import base64
import json
import os
import random
import unicodedata
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
import yaml
from PIL import Image

from projects_vil.data import check_dataset, convert_dataset, read_dataset, write_fixed
from projects_vil.data.readers import Dataset
from tests.projects_vil.helpers import message
from vil.choices import LABEL_FORMATS
from vil.cli import _main as run

STEMS = ("0", "001", "IMG_2", "my photo", "caf\u00e9", "100%", "a.b", "val_3")
FOLDERS = ("", "day1", "day2/cam", "Raw")


def save_image(path: Path, number: int) -> None:
    """Save an image whose pixels have the value ``number``. Its only object has the width ``number``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (200, 100), number).save(path)


def write_annotations(root: Path, name: str, images: dict[str, int], rng: random.Random, split: str) -> int:
    """Write annotation files of images, which are named by paths below ``root``, and return their number."""
    labels = root / rng.choice(("labels", "Annotations"))
    moved = rng.choice(("", "C:\\Users\\me\\", "/home/me/data/"))
    if name in ("Pascal VOC", "LabelMe"):
        for path, number in images.items():
            folder = rng.choice((root / Path(path).parent, labels / split / Path(path).relative_to(split).parent))
            folder.mkdir(parents=True, exist_ok=True)
            written = unicodedata.normalize(rng.choice(("NFC", "NFD")), f"{moved}{path}" if moved else Path(path).name)
            stem = Path(path).stem
            if name == "Pascal VOC":
                box = f"<xmin>11</xmin><ymin>21</ymin><xmax>{10 + number}</xmax><ymax>60</ymax>"
                text = f"<filename>{escape(written)}</filename><object><name>cat</name><bndbox>{box}</bndbox></object>"
                (folder / f"{stem}.xml").write_text(f"<annotation>{text}</annotation>", encoding="utf-8-sig")
            else:
                shape = {"label": "cat", "points": [[10, 20], [10 + number, 60]], "shape_type": "rectangle"}
                entry = {"note": "A" * 5000, "shapes": [shape], "imagePath": written}
                (folder / f"{stem}.json").write_text(json.dumps(entry), encoding="utf-8-sig")
        return len(images)
    if name == "YOLO":
        for path, number in images.items():
            text = unicodedata.normalize(rng.choice(("NFC", "NFD")), str((root / path).with_suffix(".txt")))
            Path(text).write_text(f"0 {(10 + number / 2) / 200} 0.4 {number / 200} 0.4")
        (root / "data.yaml").write_text("train: train\nval: val\nnames: [cat]\n")
        return len(images)
    labels.mkdir(parents=True, exist_ok=True)
    if name == "CVAT":
        box = '<box label="cat" xtl="10" ytl="20" xbr="{}" ybr="60"/>'
        text = "".join(
            f'<image name="{escape(path)}" width="200" height="100">{box.format(10 + n)}</image>'
            for path, n in images.items()
        )
        text = f"<annotations><meta><task><labels><label><name>cat</name></label></labels></task></meta>{text}"
        (labels / f"{split}.xml").write_text(f"{text}</annotations>")
        return 1
    content = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    for path, number in images.items():
        written = path.replace("/", rng.choice(("/", "\\")))
        content["images"].append({"id": number, "file_name": moved + written, "width": 200, "height": 100})
        box = [10, 20, number, 40]
        content["annotations"].append({"id": number, "image_id": number, "category_id": 1, "bbox": box, "area": 1})
    (labels / f"{split}.json").write_text(json.dumps(content))
    return 1


def objects_of(dataset) -> list[tuple[int, float]]:
    """Return the pixel value of the image and the width of the box of each object."""
    found = []
    for path, folder in dataset.splits.values():
        content = json.loads(path.read_text())
        images = {image["id"]: folder / image["file_name"] for image in content["images"]}
        for annotation in content["annotations"]:
            with Image.open(images[annotation["image_id"]]) as image:
                found.append((image.getpixel((0, 0)), annotation["bbox"][2]))
    return found


@pytest.mark.parametrize("name", ["Pascal VOC", "LabelMe", "CVAT", "COCO", "YOLO"])
@pytest.mark.parametrize("seed", range(12))
def test_every_file_is_counted_and_no_object_is_on_another_image(name, seed, tmp_path):
    """Images have equal names in several folders. Some images or annotations are missing, and others are added."""
    rng, root = random.Random(f"{name} {seed}"), tmp_path / "data"
    paths = [f"{split}/{folder}/{stem}" for split in ("train", "val") for folder in FOLDERS for stem in STEMS]
    numbers = {os.path.normpath(path) + ".png": n for n, path in enumerate(rng.sample(paths, 24), start=1)}
    for path, number in numbers.items():
        save_image(root / path, number)
    total = 0
    for split in ("train", "val"):
        own = {path: number for path, number in numbers.items() if path.startswith(split)}
        if own:
            total += write_annotations(root, name, own, rng, split)
    # Annotations without an image, and images without an annotation
    gone = rng.sample(sorted(numbers), 3)
    for path in gone:
        (root / path).unlink()
        for form in ("NFC", "NFD"):
            label = Path(unicodedata.normalize(form, str((root / path).with_suffix(".txt"))))
            if label.exists():
                label.write_text(rng.choice(("0,0.5,0.4,0.1,0.1", "", "\n0 .5 .4 .1 .1", "0 5E-1 .4 1E-1 .4")))
    save_image(root / "train/unlabeled.jpg", 250)
    (root / "train/clip.mp4").touch()
    (root / "boxes.csv").touch()
    save_image(root / "train/none.png", 251)
    (root / "train/none.png").rename(root / "train/none")
    (root / "notes.json").write_text('{"images": 3}')
    dataset = read_dataset(root, tmp_path / "out", val=0)
    found = objects_of(dataset) if name != "COCO" else []
    assert all(pixel == width for pixel, width in found)
    used = {
        os.path.realpath(folder / image["file_name"])
        for path, folder in dataset.splits.values()
        for image in json.loads(path.read_text())["images"]
    }
    unused = [os.path.realpath(path) for files in dataset.unused.values() for path in files]
    others = (".xml", ".json", ".txt", ".yaml")
    images = {os.path.realpath(path) for path in root.rglob("*") if path.is_file() and path.suffix not in others}
    assert images <= used | set(unused) and not used & set(unused)
    if name in ("Pascal VOC", "LabelMe"):
        without_image = dataset.unused["annotation files whose image is missing"]
        assert len(without_image) + len(found) == total and len(found) == len(numbers) - len(gone)
    own = [len(dataset.unused.get(f"label files {one}", ())) for one in ("whose image is missing", "that are not used")]
    assert name != "YOLO" or (sum(own) == len(gone) and own[0] > 0)
    assert os.path.realpath(root / "notes.json") in unused or name in ("Pascal VOC", "CVAT")


# -- datasets after public bug reports -------------------------------------------------------------

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


@pytest.mark.real_data
@pytest.mark.parametrize("name", CASES)
def test_datasets_after_public_bug_reports(name, tmp_path):
    folder = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).parent / "cases" / name / "data"
    if not folder.is_dir():
        pytest.skip("the datasets after public bug reports are absent")
    write_fixed(check_dataset(folder, fixed=tmp_path / "fixed")[1], tmp_path / "fixed")
    sizes, objects, boxes = {}, Counter(), []
    for path in sorted((tmp_path / "fixed").glob("*.json")):
        content = json.loads(path.read_text())
        names = {entry["id"]: entry["name"] for entry in content["categories"]}
        sizes[path.stem] = len(content["images"])
        assert all((tmp_path / "fixed" / image["file_name"]).is_file() for image in content["images"])
        objects.update(names[annotation["category_id"]] for annotation in content["annotations"])
        boxes += [[names[annotation["category_id"]], annotation["bbox"]] for annotation in content["annotations"]]
    expected_sizes, expected_objects, *expected_boxes = CASES[name]
    assert (sizes, objects) == (expected_sizes, expected_objects)
    assert all(box in boxes for box in expected_boxes)


# -- one small dataset per kind of file ------------------------------------------------------------

IMAGE = (200, 100)  # width and height
BOX = [10.0, 20.0, 40.0, 30.0]
YOLO_ROW = "0 0.15 0.35 0.2 0.3"


def voc_text(objects: str, name: str = "a.jpg") -> str:
    size = "<size><width>200</width><height>100</height></size>"
    return f"<annotation><filename>{name}</filename>{size}{objects}</annotation>"


def bndbox(left: object, top: object, right: object, bottom: object, label: str = "cat") -> str:
    sides = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
    return f"<object><name>{label}</name><bndbox>{sides}</bndbox></object>"


def labelme_text(shape: dict, **entry) -> str:
    shape = {"label": "cat", "shape_type": "rectangle", "points": [[50, 50], [10, 20]]} | shape
    return json.dumps({"shapes": [shape], "imagePath": "a.jpg", "imageHeight": 100, "imageWidth": 200} | entry)


def coco_text(name: str = "a.jpg", **content) -> str:
    image = {"id": 1, "file_name": name, "width": 200, "height": 100}
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": BOX, "area": 1200}
    categories = [{"id": 1, "name": "cat"}]
    return json.dumps(content | {"images": [image], "annotations": [annotation], "categories": categories})


KINDS = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files(kind, tmp_path):
    root = tmp_path / "data"
    files = dict(KINDS[kind])
    error = files.pop("error", None)
    if all(isinstance(text, str) for text in files.values()) and "inside" not in kind:
        files["a.jpg"] = None
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(text, str):
            exif = Image.Exif()
            exif[0x0112] = 6 if "EXIF" in kind else 1
            Image.new("RGB", text or IMAGE).save(path, exif=exif)
        elif text == "PIPE":
            os.mkfifo(path)
        else:
            text = text.replace("LONG", "x" * 9000)
            path.write_text(text, encoding=next((name for name in ("UTF-16", "GBK") if name in kind), "utf-8"))
    if error:
        function, *options = (convert_dataset, "yolo") if "check" in kind else (read_dataset,)
        assert error in message(function, root, tmp_path / "out", *options)
        return
    dataset, files = check_dataset(root, fixed=tmp_path / "out")
    contents = {split: one.fixed()[0] if one.findings("fixed") else one.dataset for split, one in files.items()}
    assert not any(f.found["missing_or_invalid_area"] or f.found["category_without_objects"] for f in files.values())
    assert kind.split(",")[0] in dataset.format and dataset.classes == ("0" if "class 0" in kind else "cat",)
    annotation, *others = contents["train"]["annotations"]
    assert len(others) == (19 if "many boxes" in kind else "two objects" in kind)
    np.testing.assert_allclose(annotation["bbox"], BOX, atol=0.01)
    assert all((dataset.splits["train"][1] / image["file_name"]).is_file() for image in contents["train"]["images"])
    words = "skeleton", "tag:", "path is", "text files", "label files", "swapped", "warning", "several boxes"
    words += "only images", "another split", "have masks"
    line = dataset.line().replace(warning := "warning: the validation images have no objects", "")
    assert (warning in dataset.line()) == ("val" in contents and not contents["val"]["annotations"])
    assert all((word in line) == (word in kind) for word in words) and str(tmp_path / "out") not in line
    assert "unsupported type" in line or "unsupported type" not in kind
    assert ("val" in dataset.splits) == ("splits" in kind) and (dataset.sizes["train"] == 1 or "splits" not in kind)
    # Another format has the same objects.
    output_format = LABEL_FORMATS[sorted(KINDS).index(kind) % len(LABEL_FORMATS)]
    convert_dataset(root, tmp_path / "converted", output_format)
    assert output_format != "yolo" or "\nval: " in (tmp_path / "converted/data.yaml").read_text()
    assert (converted := read_dataset(tmp_path / "converted", tmp_path / "out", val=0)).sizes == dataset.sizes
    np.testing.assert_allclose(converted.contents["train"]["annotations"][0]["bbox"], BOX, atol=0.01)


@pytest.mark.parametrize("train, val", [(["cat", "dog"], ["dog", "emu"]), (["cat", "cat"], ["cat", "cat"])])
@pytest.mark.parametrize("output_format", LABEL_FORMATS)
def test_splits_with_other_categories_keep_their_names(tmp_path, output_format, train, val):
    """The ids of a class may differ between the splits, and two ids may have one name."""
    splits = {"train": train, "val": val}
    for split, names in splits.items():
        (tmp_path / "data" / split).mkdir(parents=True)
        Image.new("RGB", IMAGE, (len(split),) * 3).save(tmp_path / "data" / split / f"{split}.png")
        box = {"bbox": BOX, "area": BOX[2] * BOX[3], "image_id": 1, "iscrowd": 0}
        content = {
            "images": [{"id": 1, "file_name": f"{split}.png", "width": IMAGE[0], "height": IMAGE[1]}],
            "categories": [{"id": number, "name": name} for number, name in enumerate(names, start=1)],
            "annotations": [box | {"id": number, "category_id": number} for number in (1, 2)],
        }
        for name in (split, "copy"):
            (tmp_path / "data" / split / f"{name}.json").write_text(json.dumps(content))
    lines = convert_dataset(tmp_path / "data", tmp_path / "converted", output_format)
    assert ("categories with the same name are one class" in lines) == (train == ["cat", "cat"])
    found = {}
    for split, content in read_dataset(tmp_path / "converted", tmp_path / "out", val=0).contents.items():
        names = {category["id"]: category["name"] for category in content["categories"]}
        found[split] = sorted(names[one["category_id"]] for one in content["annotations"])
        assert len({*names.values()}) == len(names)
    assert found == splits


def test_heic_photos_have_the_package_that_reads_them():
    unused = {"files of an unsupported type, .heic (1)": ["a.heic"]}
    lines = Dataset(Path("a"), "YOLO", {}, {}, ("cat",), has_masks=False, unused=unused).line()
    assert "warning: HEIC photos are not used. Run `pip install pillow-heif" in lines.replace("'", "")


# -- missing images and ties -----------------------------------------------------------------------


def write_files(root: Path, files: dict[str, object]) -> None:
    """Write texts, and images of a pixel value."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            Image.new("RGB", IMAGE, (content,) * 3).save(root / name)
        else:
            (root / name).write_text(content, errors="surrogateescape")


BOX_TEXT = bndbox(11, 21, 50, 50)
C_XML, D_XML = voc_text(BOX_TEXT, "c.png"), voc_text(BOX_TEXT, "d.jpg")


@pytest.mark.parametrize(
    "files, used",
    [
        # A missing image is not taken from another folder: the folder of the annotation file, or the written folder.
        ({f"cam1/{stem}.xml": voc_text(BOX_TEXT, f"{stem}.png") for stem in "ab"}, ["cam1/b.png"]),
        ({f"json/{stem}.json": labelme_text({}, imagePath=f"C:\\cam1\\{stem}.png") for stem in "ab"}, ["cam1/b.png"]),
        ({f"xml/cam1/{stem}.xml": voc_text(BOX_TEXT, f"{stem}.png") for stem in "ab"}, ["cam1/b.png"]),
        # A folder of the same name is not the folder of the missing image.
        (
            {f"cam1/labels/{s}.json": labelme_text({}, imagePath=f"..\\images\\{s}.png") for s in "ab"}
            | {"cam1/images/b.png": 3, "cam2/images/a.png": 4},
            ["cam1/images/b.png"],
        ),
        # The name of the XML file comes first with the suffix of the written name, and last with any suffix.
        ({"c.xml": voc_text(BOX_TEXT, "d.png"), "c.png": 3, "d.png": 4}, ["c.png"]),
        ({"c.xml": voc_text(BOX_TEXT, "e.jpg"), "c.png": 3}, ["c.png"]),
        ({"xml/c.xml": voc_text(BOX_TEXT, "d.jpg"), "masks/c.png": 3, "images/d.jpg": 4}, ["images/d.jpg"]),
        ({"x/c.png": 3, "x/C.png": 4, "xml/C.xml": voc_text(BOX_TEXT, "C.png")}, ["x/C.png"]),
        # A mask does not replace a missing image.
        ({"masks/c.png": 3, "masks/d.png": 3, "images/c.png": 3, "c.xml": C_XML, "d.xml": D_XML}, ["images/c.png"]),
        # The given folder comes before the written path.
        ({"c.json": labelme_text({}, imagePath="c.png"), "c.png": 3, "DIR/c.png": 4}, ["DIR/c.png"]),
        ({"c.xml": voc_text(BOX_TEXT, "c.png"), "c.png": 3, "DIR/c.png": 4}, ["DIR/c.png"]),
        (
            {f"labels/{name}.txt": YOLO_ROW for name in ("train/c", "train/d", "val/e")}
            | {f"DIR/{name}.png": number for number, name in enumerate(("train/c", "val/e"))}
            | {"data.yaml": "train: images/train\nval: images/val\nnames: [cat]"},
            ["DIR/train/c.png"],
        ),
        # An image belongs to the annotation that it fits best, and a copy to the other one.
        ({"l/c.xml": C_XML, "e/l/c.xml": C_XML, "i/c.png": 3, "e/i/c.png": 3}, ["e/i/c.png", "i/c.png"]),
        # If the given folder has no folders of splits, the names in the written folders decide.
        *(
            (
                {f"{folder}/{name}.txt": YOLO_ROW for name, folder in zip("cd", folders, strict=True)}
                | {"data.yaml": f"train: {train}\nval: {val}\nnames: [cat]", "DIR/c.png": 7, "DIR/d.png": 8, **images},
                used,
            )
            for train, val, folders, images, used in (
                ("images/train", "images/val", ("labels/train", "labels/val"), {}, ["DIR/c.png"]),
                ("x", "y", ("other", "other"), {"x/c.png": 3, "y/d.png": 4}, ["DIR/c.png"]),
                ("images", "images", ("labels", "labels"), {}, ["DIR/c.png", "DIR/d.png"]),
            )
        ),
    ],
)
def test_which_image_is_used(files, used, tmp_path):
    write_files(tmp_path / "data", {"cam1/b.png": 1, "cam2/a.png": 2} | files)
    images = tmp_path / "data/DIR"
    images = images.rename(tmp_path / "DIR") if images.is_dir() else None
    dataset = read_dataset(tmp_path / "data", tmp_path / "out", val=0, images=images)
    content, folder = dataset.contents["train"], dataset.splits["train"][1]
    found = [os.path.relpath(folder / image["file_name"], tmp_path) for image in content["images"]]
    assert found == [path if "DIR" in path else f"data/{path}" for path in used]
    # Another image or annotation file is counted, with advice if its image is missing.
    is_missing = any("missing" in reason for reason in dataset.unused)
    assert dataset.unused and is_missing == dataset.line().endswith("--images")


def test_a_folder_of_other_images_is_not_the_folder_of_a_missing_image(tmp_path):
    images = [{"id": i, "file_name": name} for i, name in enumerate(("day1/a.png", "day1/b.png", "day2/b.png"), 1)]
    objects = [{"id": i, "image_id": i, "category_id": 1, "bbox": [0, 0, 5, 5], "area": 25} for i in (1, 2, 3)]
    content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cat"}]}
    write_files(tmp_path, {"annotations.json": json.dumps(content), "day2/a.png": 1, "day2/b.png": 2})
    dataset = read_dataset(tmp_path, tmp_path / "out", val=0)
    names = [image["file_name"] for image in json.loads(dataset.splits["train"][0].read_text())["images"]]
    unused = [Path(path).name for paths in dataset.unused.values() for path in paths]
    # The dataset check reports images that are missing.
    assert names == ["day1/a.png", "day1/b.png", "day2/b.png"] and unused == ["a.png"]


@pytest.mark.parametrize("label", ["\u732b", "\u6c7d\u8f66"])
def test_a_file_in_another_encoding_than_the_declared_one(label, tmp_path):
    text = '<?xml version="1.0" encoding="gb2312"?>' + voc_text(bndbox(1, 2, 5, 6, label))
    write_files(tmp_path, {"a.jpg": 1, "a.xml": text})
    dataset = read_dataset(tmp_path, tmp_path / "out", val=0)
    assert dataset.classes == (label,) and "encoding (gb2312), read as utf-8: 1 (first: " in dataset.line()


def test_a_folder_of_annotations_may_have_its_own_images(tmp_path):
    write_files(tmp_path, {"labels/images/a.png": 1, "labels/a.txt": YOLO_ROW, "labels/classes.txt": "cat"})
    write_files(tmp_path, {"b.jpg": 2, "annots/b.xml": voc_text(BOX_TEXT, "b.jpg"), "annots/masks/b.png": 3})
    for name, used in (("labels", "labels/images"), ("annots", ".")):
        (_, folder), *_ = read_dataset(tmp_path / name, tmp_path / "out", val=0).splits.values()
        assert folder == tmp_path / used


def test_images_without_a_suffix_are_used(tmp_path):
    write_files(tmp_path / "data", {"a.png": 1, "annotations.json": coco_text("a")})
    (tmp_path / "data/a.png").rename(tmp_path / "data/a")
    dataset = read_dataset(tmp_path / "data", tmp_path / "out", val=0)
    assert dataset.sizes == {"train": 1} and not dataset.unused


def test_no_split_is_written_if_a_file_cannot_be_replaced(tmp_path):
    texts = {f"{name}.xml": voc_text(bndbox(1, 2, 5, 6), f"{name[-1]}.png") for name in ("train/a", "val/b")}
    write_files(tmp_path / "data", texts | {"train/a.png": 1, "val/b.png": 2})
    write_files(tmp_path / "out", {"val.json": "{}"})
    assert "val.json" in message(read_dataset, tmp_path / "data", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["val.json"]


def test_the_written_size_decides_a_tie(tmp_path):
    write_files(tmp_path / "data", {"x/a.png": 1, "y/a.png": 2, "a.xml": voc_text(BOX_TEXT, "a.png")})
    Image.new("L", IMAGE[::-1]).save(tmp_path / "data/y/a.png")
    assert read_dataset(tmp_path / "data", tmp_path / "out", val=0).splits["train"][1] == tmp_path / "data/x"


def test_a_failed_fix_leaves_no_files(tmp_path):
    save_image(tmp_path / "inside.png", 1)
    inside = labelme_text({}, imageData=base64.b64encode((tmp_path / "inside.png").read_bytes()).decode())
    write_files(tmp_path / "data", {"a.json": inside, "b.png": 1, "b.json": labelme_text({"points": [["x", 1]]})})
    assert "is not a number" in message(run, ["check", str(tmp_path / "data"), "--fix", str(tmp_path / "fixed")])
    assert not (tmp_path / "fixed").exists()


@pytest.mark.parametrize(
    "files, named",
    [
        ({"a.png": 1, "a.jpg": 2, "a.txt": YOLO_ROW, "classes.txt": "cat"}, "fits both"),
        ({"x/a.png": 1, "y/a.png": 2, "a.xml": voc_text("", "a.png")}, "matches both"),
        ({"a.gif": 1, "a.png": 2, "a.xml": voc_text("", "b.jpg")}, "a.png'. Rename one"),
        ({f"{d}/{n}": t for d in "xy" for n, t in (("a.png", ord(d)), ("c.json", coco_text("a.png")))}, "several COCO"),
        ({"a.png": 1, "a.txt": YOLO_ROW, "classes.txt": "ma\udce7a"}, "not UTF-8"),
    ],
)
def test_missing_images_and_ties_are_errors(files, named, tmp_path):
    write_files(tmp_path / "data", files)
    assert named in message(read_dataset, tmp_path / "data", tmp_path / "out", val=0)


def test_the_check_names_the_validation_images_of_a_training(tmp_path, capsys):
    names = "a", "b", "c", "d", "test/e"
    write_files(tmp_path / "data", {f"{name}.xml": voc_text(BOX_TEXT, f"{name[-1]}.png") for name in names})
    write_files(tmp_path / "data", {f"{name}.png": number for number, name in enumerate(names)})
    run(["check", str(tmp_path / "data")])
    number = read_dataset(tmp_path / "data", tmp_path / "out").sizes["val"]
    assert f"'vil train' validates on {number} of the images" in capsys.readouterr().out
    run(["check", str(tmp_path / "data/a.xml"), "--json", str(tmp_path / "found.json")])
    assert "needs a second, different image" in capsys.readouterr().out and (tmp_path / "found.json").exists()
    assert "has only one image" in message(read_dataset, tmp_path / "data/a.xml", tmp_path / "one")
    # Copies of an image are in the same split.
    files = {"a.png": 1, "b.png": 1, "a.xml": voc_text(BOX_TEXT, "a.png"), "b.xml": voc_text(BOX_TEXT, "b.png")}
    for folder, others in (("two", {}), ("three", {"c.png": 2, "c.xml": voc_text("", "c.png")})):
        write_files(tmp_path / folder, files | others)
        run(["check", str(tmp_path / folder)])
        assert f"another: 1, such as '{tmp_path / folder}/b.png' of '" in (text := capsys.readouterr().out)
        assert ("needs a second, different image" in text) == (folder == "two")
    assert sorted(read_dataset(tmp_path / "three", tmp_path / "out", val=0.5).sizes.values()) == [1, 2]
    images = coco_text("a.png").replace("}]", '}, {"id": 1, "file_name": "b.png"}]', 1)
    write_files(tmp_path / "three", {"ids.json": images})
    assert "Found 1 type of errors" in message(run, ["check", str(tmp_path / "three/ids.json")])
    Image.new("L", (60, 50)).save(tmp_path / "data/a.png")
    assert "Found 1 type of errors in" in message(run, ["check", str(tmp_path / "data")])
    assert "error: image_size_mismatch" in capsys.readouterr().out
