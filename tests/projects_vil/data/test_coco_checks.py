"""Test the checks of COCO files: each corruption is found, stops training or is fixed, and is not in a fixed copy."""

import json
import os
from pathlib import Path

import pytest
import torch
from pycocotools.coco import COCO

from projects_vil.data import CocoFile, Mapper, check_dataset, convert_dataset, write_cleaned, write_fixed
from projects_vil.data.coco_checks import CHECKS
from projects_vil.data.records import ground_truth
from projects_vil.files import LARGE_FILE
from tests.projects_vil.data.corruptions import CORRUPTIONS, corrupt
from tests.projects_vil.data.custom_dataset import NAME, edit, load, truncate
from tests.projects_vil.helpers import message, small_config

KEPT = "invalid_segmentation empty_mask polygon_far_outside_image invalid_rle missing_segmentation flat_segmentation"
KEPT += " bbox_as_text swapped_bbox_corners missing_iscrowd category_name_not_text missing_or_invalid_area"


def check(folder, file: str = "annotations.json", **options):
    return CocoFile(folder / file, folder / "images", **options)


def found(folder, **options) -> dict[str, int]:
    return {name: len(indices) for name, indices in check(folder, **options).found.items() if indices}


def test_a_valid_file_has_no_findings_and_every_check_has_a_case(copy):
    assert found(copy, pixels=True) == {}
    formats = {"boxes_in_xyxy_format", "boxes_in_unknown_format", "boxes_in_normalized_coordinates"}
    cases = {name for name, _ in CORRUPTIONS.values()} | formats
    assert cases == CHECKS.keys()
    # Objects of two categories may have the same box.
    other = check(copy).annotations[1] | {"id": 10**6}
    edit(copy, lambda content: content["annotations"].append(other | {"category_id": other["category_id"] % 3 + 1}))
    assert found(copy) == {}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption(copy, name):
    row = CHECKS[corrupt(copy, name)]
    before = (copy / "annotations.json").read_bytes()
    file = check(copy)
    is_error = row.severity == "error"
    assert file.found[row.name] and bool(file.findings("error")) == is_error
    (finding,) = [entry for entry in json.loads(json.dumps(file.to_json()))["found"] if entry["name"] == row.name]
    assert finding["examples"] and finding["count"] == len(file.found[row.name])
    assert any(row.name in line for line in file.lines())
    # A fixed copy has no findings, and the original file is not changed.
    write_cleaned(file, copy / "clean.json")
    assert not check(copy, "clean.json").findings("error", "fixed")
    if row.name in KEPT:
        # The object and its box are kept.
        contents = [json.loads((copy / file).read_text())["annotations"] for file in ("annotations.json", "clean.json")]
        assert len(contents[0]) == len(contents[1]) and all(one["segmentation"] for one in contents[1])
    assert "annotations.json" in message(write_cleaned, file, copy / "annotations.json")
    assert (copy / "annotations.json").read_bytes() == before
    # Training stops, or continues with records that the mapper can read.
    if is_error:
        assert str(copy) in message(load, copy, detector="mask_rcnn")
    number = {"category name with a typing mistake": 4, "category without an object": 4}.get(name, 3)
    number = {"category without a name": 2, "category id twice": 2}.get(name, number)
    overrides = ["MODEL.ROI_HEADS.NUM_CLASSES", str(number), "DATASETS.CHECK", "warn" if is_error else "error"]
    records = load(copy, *overrides, detector="mask_rcnn")
    mapper = Mapper(small_config("mask_rcnn"), is_train=True)
    assert len(records) >= 6
    for record in records:
        instances = mapper(record)["instances"]
        assert len(instances) == 0 or instances.has("gt_masks")


@pytest.mark.parametrize(
    "share, options, has_masks", [(0.6, {}, True), (0.4, {}, False), (0.6, {"masks": False}, False)]
)
@pytest.mark.parametrize("large", [0, LARGE_FILE])
def test_boxes_and_polygons_mixed(copy, share, options, has_masks, large, monkeypatch):
    monkeypatch.setattr("projects_vil.files.LARGE_FILE", large)
    monkeypatch.setattr("projects_vil.files._PART", 1)

    def mix(content) -> None:
        for one in content["annotations"][round(share * len(content["annotations"])) :]:
            one["segmentation"] = ([], [[]])[one["id"] % 2]

    edit(copy, mix)
    assert check(copy).masks == (share == 0.6)
    number = len(json.loads((copy / "annotations.json").read_text())["annotations"])
    dataset, files = check_dataset(copy, **options)
    assert dataset.has_masks == (share == 0.6) and f"of {number} objects have masks, so" in dataset.line()
    write_fixed(files, copy / "out")
    fixed = json.loads((copy / "out/train.json").read_text())["annotations"]
    assert [bool(one.get("segmentation")) for one in fixed] == [has_masks] * number
    convert_dataset(copy / "annotations.json", copy / "labelme", "labelme")
    text = "".join(path.read_text() for path in (copy / "labelme").rglob("*.json"))
    assert ('"polygon"' in text, '"rectangle"' in text) == (share == 0.6, share == 0.4)
    dataset, files = check_dataset(copy / "out")
    assert dataset.has_masks == has_masks and not any(file.findings("error", "fixed") for file in files.values())


def test_detectors_of_boxes_need_no_masks(copy):
    corrupt(copy, "polygon of NaN")
    records = load(copy)
    assert len(records) == 8 and not any("segmentation" in o for record in records for o in record["annotations"])
    assert found(copy, masks=False) == {}


def test_pixels_of_many_images_are_decoded_on_request(copy, monkeypatch):
    truncate(min((copy / "images").iterdir()))
    assert found(copy) == {"damaged_image_file": 1}
    monkeypatch.setattr("projects_vil.data.coco_checks._NUM_DECODED", 0)
    assert found(copy) == {} and found(copy, pixels=True) == {"damaged_image_file": 1}


def test_rle_is_read_as_the_polygons_that_it_is_made_of(copy):
    keys = ["INPUT.MIN_SIZE_TRAIN", "(0,)", "INPUT.RANDOM_FLIP", "none", "INPUT.MASK_FORMAT", "bitmask"]
    mapper = Mapper(small_config("mask_rcnn", *keys), is_train=True)
    records, coco = load(copy, detector="mask_rcnn"), COCO(copy / "annotations.json")

    def as_rle(content) -> None:
        for annotation in content["annotations"]:
            rle = coco.annToRLE(annotation)
            annotation["segmentation"] = {"size": rle["size"], "counts": rle["counts"].decode()}

    edit(copy, as_rle)
    assert found(copy) == {"rle_without_iscrowd": len(coco.anns)}
    for record, other in zip(records, load(copy, detector="mask_rcnn"), strict=True):
        masks = [mapper(one)["instances"].gt_masks.tensor for one in (record, other)]
        assert torch.equal(*masks) and masks[0].any()


@pytest.mark.parametrize(
    "name, to_box",
    [
        ("boxes_in_xyxy_format", lambda left, top, width, height: [left, top, left + width, top + height]),
        # The corners in labels of YOLO are read as a center and a size.
        ("boxes_in_xyxy_format", lambda x, y, w, h: [x - (x + w) / 2, y - (y + h) / 2, x + w, y + h]),
        ("boxes_in_unknown_format", lambda x, y, w, h: [-w / 2, y, w, h]),
        ("boxes_in_normalized_coordinates", lambda *box: [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_boxes_in_another_format_cannot_be_fixed(copy, name, to_box):
    def change(content) -> None:
        content["annotations"] *= 2
        for number, annotation in enumerate(content["annotations"]):
            # Boxes in an unknown format have no masks to compare with.
            masks = [] if name == "boxes_in_unknown_format" else annotation["segmentation"]
            changed = {"id": number + 1, "bbox": to_box(*annotation["bbox"]), "segmentation": masks}
            content["annotations"][number] = annotation | changed

    edit(copy, change)
    assert name in found(copy)
    assert str(copy) in message(write_cleaned, check(copy), copy / "clean.json")
    assert not (copy / "clean.json").exists()
    for mode in ("error", "warn"):
        assert "DATASETS.CHECK off" in message(load, copy, "DATASETS.CHECK", mode)
    assert load(copy, "DATASETS.CHECK", "off")
    edit(copy, lambda content: content["annotations"][0].pop("image_id"))
    assert "Repair the file" in message(ground_truth, NAME, check="off", masks=False)


def test_different_images_with_one_id_are_left_out_with_their_objects(copy):
    corrupt(copy, "image id twice")
    content = json.loads((copy / "annotations.json").read_text())
    first, second = content["images"][1], content["images"][2]
    write_cleaned(check(copy), copy / "clean.json")
    clean = json.loads((copy / "clean.json").read_text())
    assert clean["images"] == [image for image in content["images"] if image not in (first, second)]
    assert first["id"] not in {annotation["image_id"] for annotation in clean["annotations"]}


def test_missing_areas_and_boxes_are_computed_from_the_mask(copy):
    before = json.loads((copy / "annotations.json").read_text())["annotations"][1]
    corrupt(copy, "area missing")
    corrupt(copy, "box missing")
    write_cleaned(check(copy), copy / "clean.json")
    after = json.loads((copy / "clean.json").read_text())["annotations"][1]
    assert after["area"] == pytest.approx(before["area"], rel=0.1)
    assert after["bbox"] == pytest.approx(before["bbox"], abs=2)


def test_the_supercategory_of_other_categories_is_recognized(copy):
    edit(copy, lambda content: content["categories"].insert(0, {"id": 0, "name": "shapes", "supercategory": ["x"]}))
    edit(copy, lambda content: [one.update(supercategory="shapes") for one in content["categories"][1:]])
    (example,) = check(copy).examples["category_without_objects"]
    assert example == {"category": 0, "name": "shapes", "value": "the supercategory of other categories"}


@pytest.mark.real_data
def test_corruptions_on_coco(tmp_path):
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
    if not (root / "annotations/instances_val2017.json").is_file():
        pytest.skip("COCO is not in DETECTRON2_DATASETS")
    (tmp_path / "images").symlink_to((root / "val2017").resolve())
    (tmp_path / "annotations.json").write_text((root / "annotations/instances_val2017.json").read_text())
    assert not check(tmp_path).findings("error")

    def to_the_next(content) -> None:
        """Rotate the lists, because each corruption changes the second object or image."""
        for key, step in (("annotations", 7), ("images", 1)):
            content[key] = content[key][step:] + content[key][:step]

    # Corruptions of images would change the files of the dataset.
    cases = [name for name, (check_name, _) in CORRUPTIONS.items() if CHECKS[check_name].key == "annotations"]
    # This corruption changes all boxes, so it comes first.
    cases.sort(key="boxes of other images".__ne__)
    names = {edit(tmp_path, to_the_next) or corrupt(tmp_path, name) for name in cases}
    file = check(tmp_path)
    assert names <= {row.name for row in file.findings()}
    write_cleaned(file, tmp_path / "clean.json")
    assert not check(tmp_path, "clean.json").findings("error", "fixed")
