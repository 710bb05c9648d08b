"""Test COCO files: records, fixed ground truth, and the check tool."""

import json
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from detectron2.data.datasets import load_coco_json
from detectron2.structures import Boxes, BoxMode, Instances
from detectron2.utils.events import EventStorage

from projects_vil.data import CocoFile, build_train_loader, load_dataset, register_datasets, write_cleaned
from projects_vil.data.records import fixed_coco
from projects_vil.evaluation import LOSS_TASK, COCOEvaluator, build_evaluator
from projects_vil.report.coco_metrics import evaluate_detections
from tests.projects_vil.data.corruptions import corrupt, rle
from tests.projects_vil.data.custom_dataset import NAME, config, edit, entry, load
from tests.projects_vil.helpers import CONFIGS, SMALL, error_line, run_tool, small_config, untrained_detector


@pytest.mark.parametrize("large", [False, True])
def test_records_equal_detectron2s_records(copy, large, monkeypatch):
    monkeypatch.setattr("projects_vil.files.LARGE_FILE", 0 if large else math.inf)
    monkeypatch.setattr("projects_vil.files._PART", 1)
    cfg = small_config("mask_rcnn", "DATASETS.COCO", repr([entry(copy)]))
    register_datasets(cfg)
    edit(copy, lambda content: rle(lambda pixels: [100, 60, pixels - 160], crowd=1)(content, copy / "images"))
    edit(copy, lambda content: content["images"].reverse())
    ours = list(load_dataset(cfg, [NAME], train=False))
    assert ours == load_coco_json(str(copy / "annotations.json"), str(copy / "images"), NAME)
    assert any(isinstance(found.get("segmentation"), dict) for record in ours for found in record["annotations"])


# -- evaluation ------------------------------------------------------------------------------------


def evaluated(folder, name: str = NAME, *, check: str = "error") -> dict[str, float]:
    """Evaluate detections that are 0 to 2 pixels off the objects. The AP depends on the annotations only."""
    cfg = config(entry(folder, name), overrides=["DATASETS.CHECK", check])
    register_datasets(cfg)
    evaluator = build_evaluator(cfg, name, str(folder / "out"))
    evaluator.reset()
    for record in load_dataset(cfg, [name], train=False):
        objects = [found for found in record["annotations"] if not found.get("iscrowd")]
        boxes = torch.tensor([BoxMode.convert(found["bbox"], found["bbox_mode"], 0) for found in objects])
        instances = Instances((record["height"], record["width"]))
        instances.pred_boxes = Boxes(boxes + torch.arange(len(boxes))[:, None] % 3)
        instances.scores = 1 / (torch.arange(len(boxes)) + 2)
        instances.pred_classes = torch.tensor([found["category_id"] for found in objects], dtype=torch.int64)
        evaluator.process([record], [{"instances": instances}])
    return evaluator.evaluate()["bbox"]


def invalid_objects(content: dict) -> None:
    """Add objects that are removed from a fixed copy."""
    bad = [math.nan, 1.0, 5.0, 5.0], [1.0, 1.0, math.inf, 5.0], [-90.0, 1.0, 5.0, 5.0], [5.0, 5.0, None, 5.0]
    for index, annotation in enumerate(content["annotations"][:12]):
        changes = {"id": 10_000 + index, "bbox": bad[index % 4], "segmentation": [[math.nan, 1.0, 5.0, 5.0, 1.0, 9.0]]}
        content["annotations"].append(annotation | changes)


def without_ids(content: dict) -> None:
    for number, annotation in enumerate(content["annotations"]):
        annotation["id"] = (f"obj{number}", -number, number + 0.5)[number % 3]
        del annotation["iscrowd"]


@pytest.mark.parametrize("change", [invalid_objects, without_ids])
def test_evaluation_equals_the_evaluation_of_the_valid_file(copy, change, tmp_path_factory):
    clean = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(copy, clean)
    expected = evaluated(clean, f"{NAME}_clean")
    assert 0 < expected["AP"] < 100
    edit(copy, change)
    metrics = evaluated(copy, check="error" if change is without_ids else "warn")
    assert metrics == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    write_cleaned(CocoFile(copy / "annotations.json", copy / "images"), copy / "clean.json")
    (copy / "clean.json").replace(copy / "annotations.json")
    assert evaluated(copy) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("masks, area", [(1, 0), (0, 0), (1, -5.0), (0, 2500.0), (1, 2500.0), (1, 0.01)])
def test_invalid_areas_are_computed_from_the_mask_or_box(copy, caplog, masks, area):
    """The log shows the number of invalid areas. 2500 is the area of a medium object, but the boxes are small."""

    def set_areas(content: dict, area: float | None) -> None:
        for one in content["annotations"]:
            one["area"] = area
            if not masks:
                one.pop("segmentation", None)
                one["bbox"][2:] = [min(side, 30) for side in one["bbox"][2:]]

    edit(copy, lambda content: set_areas(content, None))
    expected = evaluated(copy, f"{NAME}_right")
    assert expected["APs"] > 0
    caplog.clear()
    edit(copy, lambda content: set_areas(content, area))
    assert evaluated(copy) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    number = len(json.loads((copy / "annotations.json").read_text())["annotations"])
    assert f"does not fit the box ({number}; first" in caplog.text


def with_ids(content: dict, new: Callable[[int], object]) -> None:
    for one in content["images"]:
        one["id"] = new(one["id"])
    for one in content["annotations"]:
        one.update(id=new(one["id"]), image_id=new(one["image_id"]))


@pytest.mark.parametrize("check", ["error", "off"])
@pytest.mark.parametrize("new", [lambda number: f"a{number:04}", lambda number: 2**63 + number])
def test_ids_may_be_text_or_large(copy, tmp_path_factory, new, check):
    expected = evaluated(copy, f"{NAME}_before")
    edit(copy, lambda content: with_ids(content, new))
    assert evaluated(copy, check=check) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    results = copy / "out/coco_instances_results.json"
    objects = json.loads((copy / "annotations.json").read_text())["annotations"]
    assert {one["image_id"] for one in json.loads(results.read_text())} == {one["image_id"] for one in objects}
    metrics = evaluate_detections(fixed_coco(NAME, check=check, masks=False), results, max_detections=100)
    assert 100 * metrics.curve("bbox")[:, 1].mean() == pytest.approx(expected["AP"])


def evaluator_truth(**options) -> list:
    """Return the images of an evaluation, and their annotations."""
    return list(COCOEvaluator(NAME, output_dir="", **options).truth)


def test_fixed_annotations_are_the_same_for_all_readers(copy):
    """The report, the evaluator and training all use the annotations of ``fixed_coco``."""
    corrupt(copy, "area missing")
    corrupt(copy, "iscrowd missing")
    records = load(copy)
    dataset = fixed_coco(NAME, check="error", masks=True)
    assert all("area" in a and a["iscrowd"] == 0 for a in dataset["annotations"])
    assert {a["image_id"] for a in dataset["annotations"]} == {record["image_id"] for record in records}
    pairs = [(image["id"], one) for image, own in evaluator_truth(check="error", masks=True) for one in own]
    assert pairs == sorted([(one["image_id"], one) for one in dataset["annotations"]], key=lambda pair: pair[0])
    assert any("area" not in one for _, objects in evaluator_truth(check="off", masks=True) for one in objects)
    assert "area" not in fixed_coco(NAME, check="off", masks=True)["annotations"][1]


@pytest.mark.slow
def test_a_run_on_data_that_the_check_fixes(copy, tmp_path):
    """Training, evaluation, validation loss, visualization and report use the fixed annotations only."""

    def mend(content: dict) -> None:
        images, annotations = content["images"], content["annotations"]
        for image in images[4:]:
            del image["height"]
        for annotation in annotations:
            del annotation["id"], annotation["area"], annotation["iscrowd"]
            annotation["category_id"] = str(annotation["category_id"])
        for category in content["categories"]:
            category["id"] = str(category["id"])
        annotations += [17, None]
        images[1]["height"] += 1
        (copy / "images" / images[0]["file_name"]).write_bytes(b"")
        (copy / "images" / images[2]["file_name"]).unlink()

    edit(copy, mend)
    out = tmp_path / "out"
    keys = ["DATASETS.COCO", repr([entry(copy)]), "DATASETS.TRAIN", f"('{NAME}',)", "DATASETS.TEST", f"('{NAME}',)"]
    keys += [*SMALL["retinanet"], "DATASETS.CHECK", "warn", "SOLVER.MAX_ITER", "2", "SOLVER.IMS_PER_BATCH", "2"]
    keys += ["SOLVER.WARMUP_ITERS", "0", "TEST.VALIDATION_LOSS", "True", "TEST.NUM_VISUALIZED_IMAGES", "8"]
    keys += ["OUTPUT_DIR", out]
    result = run_tool("train_net.py", "--config-file", CONFIGS["retinanet"], *keys)
    assert result.returncode == 0, result.stderr
    assert (out / "model_final.pth").exists() and len(list((out / "drawings").iterdir())) == 1
    tasks = json.loads((out / "evaluation.json").read_text())[NAME]
    assert tasks[LOSS_TASK]["total_loss"] > 0 and tasks["bbox"]["AP"] is not None
    assert {one["image_id"] for one in json.loads((out / "inference/coco_instances_results.json").read_text())} == {
        image["id"] for image in json.loads((copy / "annotations.json").read_text())["images"][3:]
    }
    result = run_tool("report.py", out)
    assert result.returncode == 0 and NAME not in result.stderr and (out / "report.html").exists()


def test_test_images_have_no_annotations(copy):
    edit(copy, lambda content: content.pop("annotations"))
    corrupt(copy, "size missing")
    assert len(load(copy, train=False)) == 8
    truth = evaluator_truth(check="error", masks=True)
    assert all(objects is None and image["height"] > 0 for image, objects in truth)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("detector, kept", [("retinanet", 0), ("mask_rcnn", 0), ("mask_rcnn", 1)])
def test_a_batch_of_images_without_objects(copy, detector, kept):
    edit(copy, lambda content: content.update(annotations=content["annotations"][:kept]))
    keys = ["DATALOADER.FILTER_EMPTY_ANNOTATIONS", "False", "SOLVER.IMS_PER_BATCH", "8"]
    keys += ["DATALOADER.ASPECT_RATIO_GROUPING", "False", "INPUT.MIN_SIZE_TRAIN", "(32,)"]
    cfg = config(entry(copy), detector=detector, overrides=keys)
    register_datasets(cfg)
    batch = next(iter(build_train_loader(cfg)))
    assert sorted(len(record["instances"]) for record in batch) == [0] * (8 - kept) + [1] * kept
    model = untrained_detector(cfg).train()
    with EventStorage():
        losses = model(batch)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_older_run_stays_if_the_annotations_are_refused(copy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model_final.pth").write_bytes(b"an older run")
    corrupt(copy, "box of NaN")
    keys = ["DATASETS.COCO", repr([entry(copy)]), "DATASETS.TRAIN", f"('{NAME}',)", "DATASETS.TEST", f"('{NAME}',)"]
    keys += [*SMALL["retinanet"], "OUTPUT_DIR", tmp_path / "out", "OVERWRITE_OUTPUT_DIR", "True"]
    result = run_tool("train_net.py", "--config-file", CONFIGS["retinanet"], *keys)
    assert str(copy / "annotations.json") in error_line(result)
    assert (tmp_path / "out/model_final.pth").read_bytes() == b"an older run"


def test_the_number_of_images_is_logged_once_in_a_run(trained_run):
    """The dataset is read before training, and not again in evaluation."""
    assert (trained_run / "log.txt").read_text().count("shapes_val: 8 images") == 1


# -- tools -----------------------------------------------------------------------------------------


def test_check_dataset(copy, tmp_path):
    edit(copy, lambda content: [one.update(bbox=[5, 5, None, 2]) for one in content["annotations"][:8]])
    arguments = [copy / "annotations.json", "--images", copy / "images", "--json", tmp_path / "found.json"]
    result = run_tool("check_dataset.py", *arguments)
    assert str(copy / "annotations.json") in error_line(result) and "error: invalid_bbox" in result.stdout
    assert "and 3 more, which --json" in result.stdout and "objects per class: " in result.stdout
    (found,) = json.loads((tmp_path / "found.json").read_text())["splits"]["train"]["found"]
    assert found["name"] == "invalid_bbox" and [one["annotation"] for one in found["examples"]] == list(range(1, 9))
    result = run_tool("check_dataset.py", *arguments, "--fix", tmp_path / "clean", "--deep")
    assert result.returncode == 0 and "changed 8" in result.stdout.splitlines()[-1], result.stderr
    clean = run_tool("check_dataset.py", tmp_path / "clean")
    assert clean.returncode == 0 and clean.stdout.splitlines()[-1] in result.stdout
