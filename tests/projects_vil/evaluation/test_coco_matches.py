"""Evaluation image by image, in one or several processes, is bitwise identical to pycocotools."""

import copy
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import COCOevalMaxDets, COCOEvaluator
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from projects_vil.data import register_datasets
from projects_vil.evaluation import build_evaluator
from projects_vil.evaluation.coco_matches import match_image, summarize
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import small_config

HEIGHT, WIDTH = 240, 320


def drawn(seed: int = 0) -> tuple[dict, list[dict]]:
    """Return a COCO file and results with crowds, equal scores, and images and categories without objects."""
    generator = np.random.default_rng(seed)
    numbers = generator.permutation(900)[:24].tolist()
    images = [{"id": n, "file_name": f"sub/{n}.jpg", "height": HEIGHT, "width": WIDTH} for n in numbers]
    annotations, results = [], []
    for index, image in enumerate(images):
        boxes = box(generator, 0 if index % 5 == 0 else 6)
        for one in boxes:
            crowd, category = int(generator.random() < 0.2), int(generator.choice([2, 3, 7]))
            entry = {"image_id": image["id"], "category_id": category, "bbox": one, "area": one[2] * one[3]}
            outline = mask_util.frPyObjects([corners(one)], HEIGHT, WIDTH)[0] if crowd else [corners(one)]
            if crowd:
                outline["counts"] = outline["counts"].decode()
            annotations.append(entry | {"id": 1000 - len(annotations), "iscrowd": crowd, "segmentation": outline})
        found = box(generator, 4) + [nudged(generator, each) for each in boxes for _ in range(5)]
        for one in found if index % 4 else ():
            rle = mask_util.frPyObjects([corners(one)], HEIGHT, WIDTH)[0]
            rle["counts"] = rle["counts"].decode()
            category, score = int(generator.choice([2, 3, 5])), float(generator.random().__round__(1))
            entry = {"image_id": image["id"], "category_id": category, "bbox": one, "score": score}
            results.append(entry | {"segmentation": rle})
    categories = [{"id": n, "name": f"class {n}"} for n in (7, 5, 3, 2)]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def box(generator: np.random.Generator, number: int) -> list[list[float]]:
    sizes = np.exp(generator.uniform(np.log(5), np.log(220), (number, 2)))
    return np.concatenate([generator.random((number, 2)) * ([WIDTH, HEIGHT] - sizes), sizes], 1).tolist()


def nudged(generator: np.random.Generator, one: list[float]) -> list[float]:
    return (np.array(one) + generator.normal(0, 0.06, 4) * one[2] * [1, 1, 0.5, 0.5]).clip(0.5).tolist()


def corners(one: list[float]) -> list[float]:
    left, top, right, bottom = one[0], one[1], one[0] + one[2], one[1] + one[3]
    return [left, top, right, top, right, bottom, left, bottom]


def assert_as_pycocotools(dataset: dict, results: list[dict], task: str, limits: list[int]) -> None:
    coco = COCO()
    coco.dataset = copy.deepcopy(dataset)
    coco.createIndex()
    unused = "bbox" if task == "segm" else ""
    copies = [{key: value for key, value in one.items() if key != unused} for one in results]
    expected = (COCOeval if limits[2] == 100 else COCOevalMaxDets)(coco, coco.loadRes(copies), task)
    expected.params.maxDets = limits
    for step in (expected.evaluate, expected.accumulate, expected.summarize):
        step()
    of_image = {
        image["id"]: [[one for one in entries if one["image_id"] == image["id"]] for entries in (annotations, results)]
        for annotations in [copy.deepcopy(dataset["annotations"])]
        for image in dataset["images"]
    }
    parts = [match_image(image, *of_image[image["id"]], task, limits) for image in dataset["images"]]
    evaluation = summarize(parts, task, [one["id"] for one in dataset["categories"]], limits)
    assert (expected.stats > 0).sum() > 6
    np.testing.assert_array_equal(evaluation.stats, expected.stats)
    for name in ("precision", "recall", "scores"):
        np.testing.assert_array_equal(evaluation.eval[name], expected.eval[name])


@pytest.mark.parametrize("task", ["bbox", "segm"])
@pytest.mark.parametrize("limits", [[1, 10, 100], [1, 10, 3], [1, 10, 300]])
def test_synthetic_objects(task, limits):
    assert_as_pycocotools(*drawn(), task, limits)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("task", ["bbox", "segm"])
def test_objects_of_coco(task):
    """The detections are moved ground truth."""
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco/annotations"
    if not (root / "instances_val2017.json").is_file():
        pytest.skip("COCO is not in DETECTRON2_DATASETS")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        dataset = json.loads((root / f"instances_{split}2017.json").read_text())
        coco, results = COCO(root / f"instances_{split}2017.json"), []
        for one in dataset["annotations"] * 2:
            mask, move = coco.annToMask(one), generator.integers(-3, 4)
            rle = mask_util.encode(np.asfortranarray(np.roll(mask, move, 1)))
            entry = {"image_id": one["image_id"], "category_id": one["category_id"], "segmentation": rle}
            entry |= {"bbox": (np.array(one["bbox"]) + [move, 0, 0, move / 2]).tolist()}
            results.append(entry | {"score": float(np.round(generator.random(), 2))})
        assert_as_pycocotools(dataset, results, task, [1, 10, 100])


def feed(evaluator: COCOEvaluator, results: list[dict], images: list[int]) -> None:
    for number in images:
        own = [one for one in results if one["image_id"] == number]
        instances = Instances((HEIGHT, WIDTH), scores=torch.tensor([one["score"] for one in own]))
        edges = np.array([corners(one["bbox"]) for one in own]).reshape(-1, 8)[:, [0, 1, 4, 5]]
        instances.pred_boxes = Boxes(edges)
        instances.pred_classes = torch.tensor([[2, 3, 5, 7].index(one["category_id"]) for one in own])
        masks = [mask_util.decode(one["segmentation"]) for one in own]
        instances.pred_masks = torch.tensor(np.array(masks).reshape(-1, HEIGHT, WIDTH))
        evaluator.process([{"image_id": number}], [{"instances": instances}])


def evaluated(folder: Path, results: list[dict], shares: list[list[int]]) -> None:
    """Evaluate in one of several processes. The main process writes the metrics."""
    dataset = f"[['drawn', '{folder}/drawn.json', '{folder}']]"
    keys = ["DATASETS.TRAIN", "('drawn',)", "MODEL.ROI_HEADS.NUM_CLASSES", "4"]
    cfg = small_config("mask_rcnn", "DATASETS.COCO", dataset, "DATASETS.CHECK", "off", *keys)
    register_datasets(cfg)
    evaluator = build_evaluator(cfg, "drawn", str(folder / f"in {len(shares)}"))
    metadata = MetadataCatalog.get("drawn")
    metadata.thing_dataset_id_to_contiguous_id = {2: 0, 3: 1, 5: 2, 7: 3}
    metadata.thing_classes = ["class 2", "class 3", "class 5", "class 7"]
    evaluator.reset()
    feed(evaluator, results, shares[comm.get_rank()])
    metrics = evaluator.evaluate()
    assert bool(metrics) == comm.is_main_process()
    if metrics:
        (folder / f"in {len(shares)}.json").write_text(json.dumps(metrics))


@pytest.mark.slow
def test_images_that_several_processes_evaluate(tmp_path):
    """Such an image counts once. The objects of an image without results count too."""
    dataset, results = drawn()
    (tmp_path / "drawn.json").write_text(json.dumps(dataset))
    images = [image["id"] for image in dataset["images"]][:-2]
    evaluated(tmp_path, results, [[*images, images[3]]])
    in_processes(3, evaluated, tmp_path, results, [images[:9], images[7:], []], store=tmp_path / "store")
    reference = COCOEvaluator("drawn", output_dir=str(tmp_path / "reference"), max_dets_per_image=100)
    reference.reset()
    feed(reference, results, images)
    expected = reference.evaluate()
    results_file = (tmp_path / "reference/coco_instances_results.json").read_text()
    assert expected["segm"]["AP"] > 1 and math.isnan(expected["bbox"].pop("AP-class 5"))
    assert math.isnan(expected["segm"].pop("AP-class 5"))
    for number in (1, 3):
        metrics = json.loads((tmp_path / f"in {number}.json").read_text())
        assert metrics["bbox"].pop("AP-class 5") != metrics["segm"].pop("AP-class 5")
        assert metrics == expected
        assert [path.name for path in (tmp_path / f"in {number}").iterdir()] == ["coco_instances_results.json"]
        assert (tmp_path / f"in {number}/coco_instances_results.json").read_text() == results_file
