"""The checks of COCO files: each corruption is found, stops training or is fixed, and is gone from a cleaned copy."""

import functools
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from backbones import ConfigError
from projects_vil.data import CocoFile, Mapper, load_dataset, register_datasets, write_cleaned
from projects_vil.data.coco_checks import CHECKS
from tests.projects_vil.data.corruptions import CORRUPTIONS, corrupt
from tests.projects_vil.data.own import NAME, edit, entry, message
from tests.projects_vil.helpers import small_config


def check(folder, file: str = "annotations.json", **options):
    return CocoFile(folder / file, folder / "images", **options)


def found(folder, **options) -> dict[str, int]:
    return {name: len(indices) for name, indices in check(folder, **options).found.items() if indices}


@functools.cache
def mask_config():
    return small_config("mask_rcnn", "INPUT.MIN_SIZE_TRAIN", "(32,)")


@functools.cache
def mapper() -> Mapper:
    return Mapper(mask_config(), is_train=True)


def load(folder, *overrides: str, train: bool = True) -> list[dict]:
    cfg = mask_config().clone()
    cfg.defrost()
    cfg.merge_from_list(["DATASETS.COCO", repr([entry(folder)]), *overrides])
    register_datasets(cfg)
    return load_dataset(cfg, [NAME], train=train, open_images=True)


def test_a_valid_file_has_no_findings_and_every_check_has_a_case(copy):
    assert found(copy, pixels=True) == {}
    cases = {name for name, _ in CORRUPTIONS.values()} | {"boxes_as_corners", "boxes_as_fractions"}
    assert cases == CHECKS.keys()


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
    # A cleaned copy has nothing left to fix, and the file itself stays as it is.
    write_cleaned(file, copy / "clean.json")
    assert not check(copy, "clean.json").findings("error", "fixed")
    assert (copy / "annotations.json").read_bytes() == before
    # Training stops, or goes on with what the mapper can read.
    if is_error:
        text = message(load, copy)
        assert str(copy) in text and len(text) < 1500
    number = {"category without an object": 4, "category without a name": 2, "category id twice": 2}.get(name, 3)
    overrides = ["MODEL.ROI_HEADS.NUM_CLASSES", str(number), "DATASETS.CHECK", "warn" if is_error else "error"]
    records = load(copy, *overrides)
    assert len(records) >= 6
    for record in records:
        instances = mapper()(record)["instances"]
        assert len(instances) == 0 or instances.has("gt_masks")


def test_detectors_of_boxes_need_no_masks(copy):
    corrupt(copy, "polygon of NaN")
    cfg = small_config("retinanet", "DATASETS.COCO", repr([entry(copy)]))
    register_datasets(cfg)
    records = load_dataset(cfg, [NAME], train=True)
    assert len(records) == 8 and not any("segmentation" in o for record in records for o in record["annotations"])
    assert found(copy, masks=False) == {}


def test_off_does_not_check(copy):
    corrupt(copy, "area of NaN")
    corrupt(copy, "box of NaN")
    assert len(load(copy, "DATASETS.CHECK", "off")) == 8
    assert "DATASETS.CHECK" in message(load, copy, "DATASETS.CHECK", "eror")


def test_truncated_pixels_are_found_by_decoding_them(copy):
    path = copy / "images" / json.loads((copy / "annotations.json").read_text())["images"][3]["file_name"]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert found(copy) == {}
    assert found(copy, pixels=True) == {"file_unreadable": 1}


@pytest.mark.parametrize("name", ["boxes_as_corners", "boxes_as_fractions"])
def test_boxes_in_another_format_cannot_be_fixed(copy, name):
    def change(content) -> None:
        content["annotations"] *= 2
        for number, annotation in enumerate(content["annotations"]):
            left, top, width, height = annotation["bbox"]
            box = [left, top, left + width, top + height] if name == "boxes_as_corners" else [0.1, 0.2, 0.3, 0.4]
            content["annotations"][number] = annotation | {"id": number + 1, "bbox": box}

    edit(copy, change)
    assert name in found(copy)
    with pytest.raises(ConfigError, match=re.escape(str(copy))):
        write_cleaned(check(copy), copy / "clean.json")
    assert not (copy / "clean.json").exists()
    for mode in ("error", "warn"):
        text = message(load, copy, "DATASETS.CHECK", mode)
        assert "DATASETS.CHECK off" in text and "--fix" not in text
    assert load(copy, "DATASETS.CHECK", "off")


def test_the_advised_command_for_boxes_ignores_masks(copy):
    folder = copy / "a folder"
    folder.mkdir()
    for name in ("annotations.json", "images"):
        (copy / name).rename(folder / name)
    corrupt(folder, "box of NaN")
    edit(folder, lambda content: [annotation.pop("segmentation") for annotation in content["annotations"][5:]])
    file = check(folder, masks=False)
    command = shlex.split(re.search(r"tools/check_dataset.py (.*?) lists all", str(file.error()))[1])
    assert command == [str(folder / "annotations.json"), str(folder / "images"), "--boxes"]
    assert "--boxes" not in str(check(folder).error())
    assert write_cleaned(file, copy / "clean.json").endswith("left out 0 images and 0 annotations, changed 1")


def test_different_images_with_one_id_are_left_out_with_their_objects(copy):
    corrupt(copy, "image id twice")
    content = json.loads((copy / "annotations.json").read_text())
    first, second = content["images"][1], content["images"][2]
    assert write_cleaned(check(copy), copy / "clean.json").startswith("6 images, ")
    clean = json.loads((copy / "clean.json").read_text())
    assert not {first["file_name"], second["file_name"]} & {image["file_name"] for image in clean["images"]}
    assert first["id"] not in {annotation["image_id"] for annotation in clean["annotations"]}


def test_missing_areas_and_boxes_are_those_of_the_mask(copy):
    before = json.loads((copy / "annotations.json").read_text())["annotations"][1]
    corrupt(copy, "area missing")
    corrupt(copy, "box missing")
    write_cleaned(check(copy), copy / "clean.json")
    after = json.loads((copy / "clean.json").read_text())["annotations"][1]
    assert after["area"] == pytest.approx(before["area"], rel=0.1)
    assert after["bbox"] == pytest.approx(before["bbox"], abs=2)


@pytest.mark.parametrize("name", ["annotations.json", "images", "absent/clean.json"])
def test_a_copy_never_replaces_a_file(copy, name):
    before = (copy / "annotations.json").read_bytes()
    with pytest.raises(ConfigError, match=name.split("/")[0]):
        write_cleaned(check(copy), copy / name)
    assert (copy / "annotations.json").read_bytes() == before and len(list((copy / "images").iterdir())) == 8


def corrupt_forty(folder) -> set[str]:
    """Apply forty corruptions, each to an object or image of its own; return the names of the checks."""
    names = set()
    for name in list(CORRUPTIONS)[:40]:
        content = json.loads((folder / "annotations.json").read_text())
        # The second of each list is corrupted: another one comes to the front each time.
        for key, step in (("annotations", 7), ("images", 1)):
            content[key] = content[key][step:] + content[key][:step]
        (folder / "annotations.json").write_text(json.dumps(content))
        names.add(corrupt(folder, name))
    return names


@pytest.fixture
def coco(tmp_path):
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
    if not (root / "annotations/instances_val2017.json").is_file():
        pytest.skip("COCO is not in DETECTRON2_DATASETS")
    (tmp_path / "images").symlink_to((root / "val2017").resolve())
    (tmp_path / "annotations.json").write_text((root / "annotations/instances_val2017.json").read_text())
    return tmp_path


@pytest.mark.real_data
def test_forty_corruptions_of_coco(coco):
    assert not check(coco).findings("error")
    names = corrupt_forty(coco)
    file = check(coco)
    assert len(names) > 20 and names <= {row.name for row in file.findings()}
    write_cleaned(file, coco / "clean.json")
    assert not check(coco, "clean.json").findings("error", "fixed")
