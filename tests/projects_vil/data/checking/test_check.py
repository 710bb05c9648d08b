"""Each fault is found by its kind, told in one line, and gone from a cleaned copy, which the mapper takes."""

import functools
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from detectron2.data import MetadataCatalog

from backbones import InputError
from projects_vil.data import Mapper, check_coco, evaluated_as, load_dataset, register_datasets, write_cleaned
from projects_vil.data.checking import KINDS
from projects_vil.solver import count_training_images
from tests.projects_vil.data.checking.faults import FAULTS, spoil
from tests.projects_vil.data.own import NAME, edit, entry, message
from tests.projects_vil.helpers import small_config


def found(folder, **options) -> dict[str, int]:
    findings = check_coco(folder / "annotations.json", folder / "images", **options).findings
    return {kind.name: len(findings.places[kind.name]) for kind in findings.kinds()}


def mask_config(folder, *overrides: str):
    datasets = ["DATASETS.COCO", repr([entry(folder)]), "DATASETS.TRAIN", f"('{NAME}',)"]
    cfg = _mask_config().clone()
    cfg.merge_from_list([*datasets, *overrides])
    return cfg


@functools.cache
def _mask_config():
    cfg = small_config("mask_rcnn", "INPUT.MIN_SIZE_TRAIN", "(32,)").clone()
    cfg.defrost()
    return cfg


@functools.cache
def mapper() -> Mapper:
    return Mapper(_mask_config(), is_train=True)


def load(folder, *overrides: str, train: bool = True) -> list[dict]:
    cfg = mask_config(folder, *overrides)
    register_datasets(cfg)
    return load_dataset(cfg, [NAME], train=train, open_images=True)


def test_nothing_is_found_in_a_sound_file(copy):
    assert found(copy, pixels=True) == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_mended(copy, name):
    kind = KINDS[spoil(copy, name)]
    before = (copy / "annotations.json").read_bytes()
    checked = check_coco(copy / "annotations.json", copy / "images")
    findings = checked.findings
    assert kind.name in findings.places and (findings.count("error") > 0) == (kind.level == "error")
    (told,) = [entry for entry in findings.to_json()["found"] if entry["kind"] == kind.name]
    assert told["examples"] and json.dumps(findings.to_json())
    assert any(kind.counted(len(findings.places[kind.name])) in line for line in findings.lines())
    if kind.level == "error":
        line = str(findings.error())
        assert str(copy) in line and "\n" not in line and len(line) < 1500
    words = write_cleaned(checked, copy / "clean.json")
    assert words and (copy / "annotations.json").read_bytes() == before
    again = check_coco(copy / "clean.json", copy / "images").findings
    assert not again.count("error") and not again.count("mended"), again.lines()


@pytest.mark.parametrize("name", FAULTS)
def test_training_stops_or_goes_on_as_it_says(copy, name):
    kind = KINDS[spoil(copy, name)]
    classes = ("category without a name", "category without an object", "category id twice")
    if name in classes:
        number = {"category without an object": "4"}.get(name, "2")
        overrides = ["MODEL.ROI_HEADS.NUM_CLASSES", number]
    else:
        overrides = []
    if kind.level == "error":
        text = message(load, copy)
        assert str(copy) in text
    records = load(copy, *overrides, *(["DATASETS.CHECK", "warn"] if kind.level == "error" else []))
    for record in records:
        instances = mapper()(record)["instances"]
        assert len(instances) == 0 or instances.has("gt_masks")
    assert len(records) >= 6


def test_a_detector_of_boxes_needs_no_masks(copy):
    spoil(copy, "polygon of NaN")
    register_datasets(mask_config(copy))
    cfg = small_config("retinanet", "DATASETS.COCO", repr([entry(copy)]))
    records = load_dataset(cfg, [NAME], train=True)
    assert len(records) == 8 and not any("segmentation" in o for record in records for o in record["annotations"])
    assert found(copy, masks=False) == {}


def test_off_does_not_look(copy):
    spoil(copy, "area of NaN")
    spoil(copy, "box of NaN")
    assert len(load(copy, "DATASETS.CHECK", "off")) == 8


def test_an_unknown_way_to_check(copy):
    assert "unknown DATASETS.CHECK 'eror'" in message(load, copy, "DATASETS.CHECK", "eror")


def test_truncated_pixels_are_found_by_reading_them(copy):
    path = copy / "images" / json.loads((copy / "annotations.json").read_text())["images"][3]["file_name"]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert found(copy) == {}
    assert found(copy, pixels=True) == {"file_unreadable": 1}


def many(content, change) -> None:
    """Thirty objects and more, each changed by its box."""
    content["annotations"] *= 2
    for number, annotation in enumerate(content["annotations"]):
        content["annotations"][number] = annotation | {"id": number + 1, "bbox": change(annotation)}


def corners(annotation) -> list[float]:
    left, top, width, height = annotation["bbox"]
    return [left, top, left + width, top + height]


def test_boxes_as_corners_are_told(copy):
    edit(copy, lambda content: many(content, corners))
    assert "boxes_as_corners" in found(copy)
    checked = check_coco(copy / "annotations.json", copy / "images")
    with pytest.raises(InputError, match="cannot be mended: convert them"):
        write_cleaned(checked, copy / "clean.json")
    assert not (copy / "clean.json").exists()
    for check in ("error", "warn"):
        text = message(load, copy, "DATASETS.CHECK", check)
        assert "[left, top, right, bottom]" in text and "DATASETS.CHECK off" in text
        assert "--fix" not in text and "DATASETS.CHECK warn" not in text
    assert load(copy, "DATASETS.CHECK", "off")


def test_the_advice_for_a_detector_of_boxes_leaves_masks_alone(copy):
    """As it is typed: a copy that it makes has lost nothing that such a detector learns."""
    folder = copy / "a folder"
    folder.mkdir()
    for name in ("annotations.json", "images"):
        (copy / name).rename(folder / name)
    spoil(folder, "box of NaN")
    edit(folder, lambda content: [found.pop("segmentation") for found in content["annotations"][5:]])
    checked = check_coco(folder / "annotations.json", folder / "images", masks=False)
    text = str(checked.findings.error())
    _, *arguments = shlex.split(text[text.index("tools/check_dataset.py") : text.index(" lists all")])
    assert arguments == [str(folder / "annotations.json"), str(folder / "images"), "--boxes"]
    assert "--boxes" not in str(check_coco(folder / "annotations.json", folder / "images").findings.error())
    assert write_cleaned(checked, copy / "clean.json").endswith("left out 0 images and 0 annotations, changed 1")


def test_boxes_as_fractions_are_told(copy):
    edit(copy, lambda content: many(content, lambda a: [0.1, 0.2, 0.3, 0.4]))
    assert "boxes_as_fractions" in found(copy)
    assert "fractions of the image" in message(load, copy)


def test_two_images_of_one_id_leave_with_their_objects(copy):
    """Whose objects those are cannot be told."""
    spoil(copy, "image id twice")
    content = json.loads((copy / "annotations.json").read_text())
    first, second = content["images"][1], content["images"][2]
    checked = check_coco(copy / "annotations.json", copy / "images")
    assert write_cleaned(checked, copy / "clean.json").startswith("6 images, ")
    clean = json.loads((copy / "clean.json").read_text())
    assert not {first["file_name"], second["file_name"]} & {image["file_name"] for image in clean["images"]}
    assert first["id"] not in {annotation["image_id"] for annotation in clean["annotations"]}


def test_an_area_and_a_box_are_those_of_the_mask(copy):
    before = json.loads((copy / "annotations.json").read_text())["annotations"][1]
    spoil(copy, "area missing")
    spoil(copy, "box missing")
    write_cleaned(check_coco(copy / "annotations.json", copy / "images"), copy / "clean.json")
    after = json.loads((copy / "clean.json").read_text())["annotations"][1]
    assert after["area"] == pytest.approx(before["area"], rel=0.1)
    assert after["bbox"] == pytest.approx(before["bbox"], abs=2)


def test_a_copy_never_takes_the_place_of_a_file(copy):
    checked = check_coco(copy / "annotations.json", copy / "images")
    shutil.copy(copy / "annotations.json", copy / "other.json")
    words_by_name = {"annotations.json": "it is the file itself", "other.json": "it exists", "images": "folder"}
    for name, words in words_by_name.items():
        with pytest.raises(InputError, match=words):
            write_cleaned(checked, copy / name)
    with pytest.raises(InputError, match="there is no folder"):
        write_cleaned(checked, copy / "absent" / "clean.json")


class ToldToEnd(dict):
    """Tells its process to end while it is written."""

    def items(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().items()


def test_nothing_is_left_of_a_copy_that_is_told_to_end(copy):
    checked = check_coco(copy / "annotations.json", copy / "images")
    checked.dataset["info"] = ToldToEnd(year=2026)
    with pytest.raises(SystemExit):
        write_cleaned(checked, copy / "clean.json")
    assert sorted(path.name for path in copy.iterdir()) == ["annotations.json", "images"]


def test_what_was_counted_silently_is_said_by_the_next_reading(copy, caplog):
    spoil(copy, "area missing")
    cfg = mask_config(copy)
    register_datasets(cfg)
    with caplog.at_level("INFO"):
        assert count_training_images(cfg) == 8
        assert not any("without an area" in text for text in caplog.messages)
        load(copy)
    assert any("without an area" in text for text in caplog.messages)


def test_images_to_be_tested_stay_without_annotations(copy):
    edit(copy, lambda content: content.pop("annotations"))
    spoil(copy, "size missing")
    cfg = mask_config(copy)
    register_datasets(cfg)
    assert len(load_dataset(cfg, [NAME], train=False)) == 8
    with evaluated_as(NAME, check="error", masks=True) as name:
        assert name != NAME and "annotations" not in json.loads(Path(MetadataCatalog.get(name).json_file).read_text())
