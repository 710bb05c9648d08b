"""Detectors on files with faults, on their cleaned copies, and on images without objects."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.data.datasets import load_coco_json
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from pycocotools import mask as mask_util

from projects_vil.data import (
    build_mapper,
    build_train_loader,
    check_coco,
    load_dataset,
    register_datasets,
    write_cleaned,
)
from projects_vil.evaluation import build_evaluator
from tests.projects_vil.data.checking.faults import FAULTS, add_objects_with_faults, cut, rle, spoil
from tests.projects_vil.data.own import NAME, config, edit, entry
from tests.projects_vil.helpers import CONFIGS, SMALL, error_line, lively_detector, run_tool, small_config
from tests.selection import slow_except


def evaluated(folder, name: str = NAME, *, check: str = "error") -> dict[str, float]:
    """AP of detections that are off the objects by a pixel or two: nothing but the annotations can change it."""
    cfg = config(entry(folder, name), overrides=["DATASETS.CHECK", check])
    register_datasets(cfg)
    evaluator = build_evaluator(cfg, name, str(folder / "out"))
    evaluator.reset()
    for record in load_dataset(cfg, [name], train=False):
        objects = [found for found in record["annotations"] if not found.get("iscrowd")]
        boxes = torch.tensor([found["bbox"] for found in objects]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        instances = Instances((record["height"], record["width"]))
        instances.pred_boxes = Boxes(boxes + torch.arange(len(boxes))[:, None] % 3)
        instances.scores = 1 / (torch.arange(len(boxes)) + 2)
        instances.pred_classes = torch.tensor([found["category_id"] for found in objects], dtype=torch.int64)
        evaluator.process([record], [{"instances": instances}])
    return evaluator.evaluate()["bbox"]


def equal(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(one[key] == other[key] or math.isnan(one[key]) and math.isnan(other[key]) for key in one)


def test_records_are_those_of_detectron2(copy):
    cfg = small_config("mask_rcnn", "DATASETS.COCO", repr([entry(copy)]))
    register_datasets(cfg)
    edit(copy, lambda content: rle(lambda pixels: [100, 60, pixels - 160], crowd=1)(content, copy / "images"))
    edit(copy, lambda content: content["images"].reverse())
    ours = load_dataset(cfg, [NAME], train=False)
    assert ours == load_coco_json(str(copy / "annotations.json"), str(copy / "images"), NAME)
    assert any(isinstance(found.get("segmentation"), dict) for record in ours for found in record["annotations"])


def test_evaluation_counts_what_is_sound(copy, tmp_path_factory):
    clean = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(copy, clean)
    expected = evaluated(clean, f"{NAME}_clean")
    assert 0 < expected["AP"] < 100
    edit(copy, lambda content: add_objects_with_faults(content, 12))
    assert equal(evaluated(copy, check="warn"), expected)
    write_cleaned(check_coco(copy / "annotations.json", copy / "images"), copy / "mended.json")
    (copy / "mended.json").replace(copy / "annotations.json")
    assert equal(evaluated(copy), expected)


def test_evaluation_fills_in_what_is_missing(copy, tmp_path_factory):
    clean = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(copy, clean)
    expected = evaluated(clean, f"{NAME}_clean")

    def spoil_all(content):
        for number, annotation in enumerate(content["annotations"]):
            annotation["category_id"] = str(annotation["category_id"])
            for key in ("area", "iscrowd", "id")[: 1 + number % 3]:
                annotation.pop(key)

    edit(copy, spoil_all)
    assert evaluated(copy)["AP"] == expected["AP"]


def test_evaluation_of_images_with_ids_of_both_types(copy):
    expected = evaluated(copy)
    spoil(copy, "image id as text")
    assert equal(evaluated(copy, check="warn"), expected)


@pytest.mark.parametrize("ids", [lambda number: f"obj{number}", lambda number: -number, lambda number: number + 0.5])
def test_evaluation_of_ids_that_it_does_not_take(copy, ids):
    expected = evaluated(copy)
    edit(copy, lambda content: [a.update(id=ids(number)) for number, a in enumerate(content["annotations"])])
    assert equal(evaluated(copy), expected)


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_batch_of_images_without_objects(copy, detector, kept):
    """All of the batch, or all but one."""
    edit(copy, lambda content: content.update(annotations=content["annotations"][:kept]))
    keys = ["DATASETS.COCO", repr([entry(copy)]), "DATASETS.TRAIN", f"('{NAME}',)"]
    keys += ["DATALOADER.FILTER_EMPTY_ANNOTATIONS", "False", "SOLVER.IMS_PER_BATCH", "8"]
    keys += ["DATALOADER.ASPECT_RATIO_GROUPING", "False", "INPUT.MIN_SIZE_TRAIN", "(32,)"]
    cfg = small_config(detector, *keys)
    register_datasets(cfg)
    batch = next(iter(build_train_loader(cfg)))
    assert sorted(len(record["instances"]) for record in batch) == [0] * (8 - kept) + [1] * kept
    model = lively_detector(cfg).train()
    with EventStorage():
        losses = model(batch)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masks_of_rle_are_learned_as_those_of_polygons(copy):
    """The same masks both ways give the same targets, but for a pixel at their edges."""
    cfg = small_config(
        "mask_rcnn", "DATASETS.COCO", repr([entry(copy)]), "INPUT.RANDOM_FLIP", "none", "INPUT.MIN_SIZE_TRAIN", "(64,)"
    )
    register_datasets(cfg)

    def masks() -> list[torch.Tensor]:
        mapper = build_mapper(cfg, is_train=True)
        instances = [mapper(record)["instances"] for record in load_dataset(cfg, [NAME], train=True)]
        return [found.gt_masks.crop_and_resize(found.gt_boxes.tensor, 28).float() for found in instances]

    before = masks()

    def as_rle(content):
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        for annotation in content["annotations"]:
            size = sizes[annotation["image_id"]]
            merged = mask_util.merge(mask_util.frPyObjects(annotation["segmentation"], *size))
            annotation["segmentation"] = {"size": list(size), "counts": merged["counts"].decode()}

    edit(copy, as_rle)
    before, after = torch.cat(before), torch.cat(masks())
    assert (before - after).abs().mean() < 0.06 and 0.4 < before.mean() < 0.9


def train(folder: Path, output: Path, *overrides: str, detector: str = "retinanet", file: str = "annotations.json"):
    datasets = [["own", str(folder / file), str(folder / "images")]]
    keys = [*SMALL[detector], "SOLVER.IMS_PER_BATCH", "4", "SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "2"]
    keys += ["DATASETS.COCO", repr(datasets), "DATASETS.TRAIN", "('own',)", "DATASETS.TEST", "('own',)"]
    return run_tool("train_net.py", "--config-file", CONFIGS[detector], *keys, "OUTPUT_DIR", output, *overrides)


@pytest.mark.parametrize("workers", slow_except([0, 2], [0]))
def test_an_image_that_breaks_off_ends_training_in_one_line(copy, tmp_path, workers):
    for path in (copy / "images").iterdir():
        cut(path)
    result = train(copy, tmp_path / "out", "DATALOADER.NUM_WORKERS", str(workers))
    assert f"cannot read the image {copy / 'images'}/" in error_line(result)
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stdout
    assert "Traceback" in (tmp_path / "out/log.txt").read_text()


def test_nothing_of_an_older_run_is_lost_to_a_file_with_faults(copy, tmp_path):
    """Not even where a new one may take its place."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model_final.pth").write_bytes(b"an older run")
    spoil(copy, "box of NaN")
    result = train(copy, tmp_path / "out", "OVERWRITE_OUTPUT_DIR", "True")
    assert "has 1 box that is not finite (annotation 2 of image" in error_line(result)
    assert (tmp_path / "out/model_final.pth").read_bytes() == b"an older run"


def test_the_tool(copy, tmp_path):
    spoil(copy, "box of NaN")
    spoil(copy, "area missing")
    arguments = [copy / "annotations.json", copy / "images", "--json", tmp_path / "found.json"]
    result = run_tool("check_dataset.py", *arguments)
    assert "has 1 box that is not finite" in error_line(result) and result.returncode == 1
    assert "mended: 1 annotation without an area" in result.stdout
    assert [found["kind"] for found in json.loads((tmp_path / "found.json").read_text())["found"]] == [
        "box_not_finite",
        "area_missing",
    ]
    result = run_tool("check_dataset.py", *arguments, "--fix", tmp_path / "clean.json", "--deep")
    assert result.returncode == 0 and "changed 1" in result.stdout.splitlines()[-1], result.stderr
    assert run_tool("check_dataset.py", tmp_path / "clean.json", copy / "images").returncode == 0
    result = run_tool("check_dataset.py", *arguments, "--fix", copy / "annotations.json")
    assert error_line(result).endswith("it is the file itself; name a new file")


def forty_faults(folder: Path) -> set[str]:
    """The kinds of forty faults, each on an object or an image of its own, in a copy of COCO."""
    kinds = set()
    for name in list(FAULTS)[:40]:
        content = json.loads((folder / "annotations.json").read_text())
        # What is spoilt is the second of each list: another one comes to the front each time.
        for key, step in (("annotations", 7), ("images", 1)):
            content[key] = content[key][step:] + content[key][:step]
        (folder / "annotations.json").write_text(json.dumps(content))
        kinds.add(spoil(folder, name))
    return kinds


@pytest.fixture
def coco(tmp_path):
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
    if not (root / "annotations/instances_val2017.json").is_file():
        pytest.skip("there is no COCO in DETECTRON2_DATASETS")
    (tmp_path / "images").mkdir()
    for path in (root / "val2017").iterdir():
        (tmp_path / "images" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "annotations.json").write_text((root / "annotations/instances_val2017.json").read_text())
    return tmp_path


@pytest.mark.real_data
def test_forty_faults_in_photos_of_coco(coco):
    assert not check_coco(coco / "annotations.json", coco / "images").findings.count("error")
    kinds = forty_faults(coco)
    checked = check_coco(coco / "annotations.json", coco / "images")
    found = {kind.name for kind in checked.findings.kinds()}
    assert len(kinds) > 20 and kinds <= found, kinds - found
    write_cleaned(checked, coco / "clean.json")
    again = check_coco(coco / "clean.json", coco / "images").findings
    assert not again.count("error") and not again.count("mended")


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_the_cleaned_photos_train(coco, tmp_path, detector):
    forty_faults(coco)
    refused = train(coco, tmp_path / "refused", detector=detector)
    assert str(coco / "annotations.json") in error_line(refused)
    write_cleaned(check_coco(coco / "annotations.json", coco / "images"), coco / "clean.json")
    key = "MODEL.RETINANET.NUM_CLASSES" if detector == "retinanet" else "MODEL.ROI_HEADS.NUM_CLASSES"
    overrides = [key, "80", "SOLVER.MAX_ITER", "4"]
    result = train(coco, tmp_path / "out", *overrides, detector=detector, file="clean.json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/evaluation.json").is_file() and (tmp_path / "out/model_final.pth").is_file()
