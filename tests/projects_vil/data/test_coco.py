"""COCO files as training and evaluation read them: records, fixed ground truth, subsets, and the tool."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from pycocotools.coco import COCO

from projects_vil.data import (
    CocoFile,
    build_train_loader,
    evaluated_as,
    fixed_coco,
    load_dataset,
    register_datasets,
    write_cleaned,
    write_subset,
)
from projects_vil.evaluation import build_evaluator
from tests.projects_vil.data.corruptions import add_invalid_objects, corrupt, rle
from tests.projects_vil.data.own import NAME, config, edit, entry, load, message
from tests.projects_vil.helpers import CONFIGS, SMALL, error_line, run_tool, small_config, untrained_detector


def test_records_are_those_of_detectron2(copy):
    cfg = small_config("mask_rcnn", "DATASETS.COCO", repr([entry(copy)]))
    register_datasets(cfg)
    edit(copy, lambda content: rle(lambda pixels: [100, 60, pixels - 160], crowd=1)(content, copy / "images"))
    edit(copy, lambda content: content["images"].reverse())
    ours = load_dataset(cfg, [NAME], train=False)
    assert ours == load_coco_json(str(copy / "annotations.json"), str(copy / "images"), NAME)
    assert any(isinstance(found.get("segmentation"), dict) for record in ours for found in record["annotations"])


# -- evaluation ------------------------------------------------------------------------------------


def evaluated(folder, name: str = NAME, *, check: str = "error") -> dict[str, float]:
    """Evaluate detections one or two pixels off the objects: only the annotations can change the AP."""
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


def without_ids(content: dict) -> None:
    for number, annotation in enumerate(content["annotations"]):
        annotation["id"] = (f"obj{number}", -number, number + 0.5)[number % 3]
        del annotation["iscrowd"]


@pytest.mark.parametrize("case", ["invalid objects", "ids of two types", "ids and iscrowd"])
def test_evaluation_is_that_of_the_valid_file(copy, case, tmp_path_factory):
    clean = tmp_path_factory.mktemp("clean") / "copy"
    shutil.copytree(copy, clean)
    expected = evaluated(clean, f"{NAME}_clean")
    assert 0 < expected["AP"] < 100
    if case == "invalid objects":
        edit(copy, lambda content: add_invalid_objects(content, 12))
    elif case == "ids of two types":
        corrupt(copy, "image id as text")
    else:
        edit(copy, without_ids)

    def is_expected(metrics) -> bool:
        return all(metrics[k] == v or math.isnan(metrics[k]) and math.isnan(v) for k, v in expected.items())

    assert is_expected(evaluated(copy, check="error" if case == "ids and iscrowd" else "warn"))
    write_cleaned(CocoFile(copy / "annotations.json", copy / "images"), copy / "clean.json")
    (copy / "clean.json").replace(copy / "annotations.json")
    assert is_expected(evaluated(copy))


def test_fixed_annotations_are_the_same_for_all_readers(copy):
    """The report reads ``fixed_coco``, the evaluator a copy of it, training its records."""
    corrupt(copy, "area missing")
    corrupt(copy, "iscrowd missing")
    records = load(copy)
    dataset, is_changed = fixed_coco(NAME, check="error", masks=True)
    assert is_changed and all("area" in a and a["iscrowd"] == 0 for a in dataset["annotations"])
    assert {a["image_id"] for a in dataset["annotations"]} == {record["image_id"] for record in records}
    with evaluated_as(NAME, check="error", masks=True) as name:
        assert name != NAME and json.loads(Path(MetadataCatalog.get(name).json_file).read_text()) == dataset
    with evaluated_as(NAME, check="off", masks=True) as name:
        assert name == NAME
    assert "area" not in fixed_coco(NAME, check="off", masks=True)[0]["annotations"][1]


def test_test_images_have_no_annotations(copy):
    edit(copy, lambda content: content.pop("annotations"))
    corrupt(copy, "size missing")
    assert len(load(copy, train=False)) == 8
    with evaluated_as(NAME, check="error", masks=True) as name:
        assert name != NAME and "annotations" not in json.loads(Path(MetadataCatalog.get(name).json_file).read_text())


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("detector, kept", [("retinanet", 0), ("mask_rcnn", 0), ("mask_rcnn", 1)])
def test_a_batch_of_images_without_objects(copy, detector, kept):
    edit(copy, lambda content: content.update(annotations=content["annotations"][:kept]))
    keys = ["DATASETS.COCO", repr([entry(copy)]), "DATASETS.TRAIN", f"('{NAME}',)"]
    keys += ["DATALOADER.FILTER_EMPTY_ANNOTATIONS", "False", "SOLVER.IMS_PER_BATCH", "8"]
    keys += ["DATALOADER.ASPECT_RATIO_GROUPING", "False", "INPUT.MIN_SIZE_TRAIN", "(32,)"]
    cfg = small_config(detector, *keys)
    register_datasets(cfg)
    batch = next(iter(build_train_loader(cfg)))
    assert sorted(len(record["instances"]) for record in batch) == [0] * (8 - kept) + [1] * kept
    model = untrained_detector(cfg).train()
    with EventStorage():
        losses = model(batch)
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def train(folder: Path, output: Path, *overrides: str):
    datasets = [["own", str(folder / "annotations.json"), str(folder / "images")]]
    keys = [*SMALL["retinanet"], "SOLVER.IMS_PER_BATCH", "4", "SOLVER.WARMUP_ITERS", "0", "SOLVER.MAX_ITER", "2"]
    keys += ["DATASETS.COCO", repr(datasets), "DATASETS.TRAIN", "('own',)", "DATASETS.TEST", "('own',)"]
    return run_tool("train_net.py", "--config-file", CONFIGS["retinanet"], *keys, "OUTPUT_DIR", output, *overrides)


def test_an_older_run_stays_if_the_annotations_are_refused(copy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model_final.pth").write_bytes(b"an older run")
    corrupt(copy, "box of NaN")
    result = train(copy, tmp_path / "out", "OVERWRITE_OUTPUT_DIR", "True")
    assert str(copy / "annotations.json") in error_line(result)
    assert (tmp_path / "out/model_final.pth").read_bytes() == b"an older run"


# -- tools -----------------------------------------------------------------------------------------


def test_check_dataset(copy, tmp_path):
    corrupt(copy, "box of NaN")
    arguments = [copy / "annotations.json", copy / "images", "--json", tmp_path / "found.json"]
    result = run_tool("check_dataset.py", *arguments)
    assert str(copy / "annotations.json") in error_line(result) and "box_form" in result.stdout
    assert [one["name"] for one in json.loads((tmp_path / "found.json").read_text())["found"]] == ["box_form"]
    result = run_tool("check_dataset.py", *arguments, "--fix", tmp_path / "clean.json", "--deep")
    assert result.returncode == 0 and "changed 1" in result.stdout.splitlines()[-1], result.stderr
    assert run_tool("check_dataset.py", tmp_path / "clean.json", copy / "images").returncode == 0
    result = run_tool("check_dataset.py", *arguments, "--fix", copy / "annotations.json")
    assert str(copy / "annotations.json") in error_line(result)


def test_subset_is_spread_over_the_annotated_images(shapes, tmp_path):
    source = shapes / "annotations/instances_train.json"
    assert write_subset(source, tmp_path / "four.json", num_images=4) == 4
    whole, subset = json.loads(source.read_text()), json.loads((tmp_path / "four.json").read_text())
    assert [image["id"] for image in subset["images"]] == [1, 5, 9, 13]
    assert subset["annotations"] == [a for a in whole["annotations"] if a["image_id"] in (1, 5, 9, 13)]
    assert subset["categories"] == whole["categories"] and COCO(tmp_path / "four.json").getCatIds() == [1, 2, 3]
    whole["annotations"] = [a for a in whole["annotations"] if a["image_id"] > 10]
    (tmp_path / "source.json").write_text(json.dumps(whole))
    assert write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=100) == 6


@pytest.mark.parametrize("text", [None, "{", "[]", '{"images": []}', '{"images": [{"id": 1}], "categories": [{}]}'])
def test_subset_of_another_file(tmp_path, text):
    if text is not None:
        (tmp_path / "source.json").write_text(text)
    assert "source.json" in message(
        lambda: write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=1)
    )
