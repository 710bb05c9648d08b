"""How long COCO's metrics take by pycocotools, and by faster-coco-eval."""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances

from projects_vil.analysis.drawn_coco import NUM_CLASSES, SIZE, draw_boxes, draw_objects, write_annotations
from projects_vil.evaluation import COCO_APIS, coco_evaluator

_NAME = "compare_coco_apis"


class ApiComparison(NamedTuple):
    """Median seconds of each API, and the metrics that each has computed."""

    seconds: dict[str, float]
    metrics: dict[str, dict[str, float]]


def compare_coco_apis(*, num_images: int, num_detections: int, runs: int) -> ApiComparison:
    """Time both on drawn boxes, by turns in one process: from detections in memory to metrics, the file among it.

    Args:
        num_images: of the drawn dataset, of 80 classes, with 7 objects each.
        num_detections: of each image; near its objects and elsewhere by halves.

    Raises:
        InputError: where faster-coco-eval is not installed.
    """
    generator = np.random.default_rng(0)
    boxes, classes = draw_objects(generator, num_images)
    found = [_detections(generator, *objects, num_detections) for objects in zip(boxes, classes, strict=True)]
    seconds: dict[str, list[float]] = {api: [] for api in COCO_APIS}
    metrics = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "annotations.json"
        write_annotations(path, boxes, classes)
        register_coco_instances(_NAME, {}, str(path), folder)
        try:
            # Which number of a class is which id is known once it is read.
            DatasetCatalog.get(_NAME)
            evaluators = {api: coco_evaluator(_NAME, output_dir=folder, check="off", api=api) for api in COCO_APIS}
            for _ in range(runs):
                for api, evaluator in evaluators.items():
                    duration, metrics[api] = _judged(evaluator, found)
                    seconds[api].append(duration)
        finally:
            DatasetCatalog.remove(_NAME)
            MetadataCatalog.remove(_NAME)
    return ApiComparison({api: statistics.median(own) for api, own in seconds.items()}, metrics)


def _judged(evaluator: COCOEvaluator, found: list[Instances]) -> tuple[float, dict[str, float]]:
    evaluator.reset()
    for index, instances in enumerate(found):
        evaluator.process([{"image_id": index + 1}], [{"instances": instances}])
    begun = time.perf_counter()
    metrics = evaluator.evaluate()["bbox"]
    return time.perf_counter() - begun, metrics


def _detections(generator: np.random.Generator, truth: np.ndarray, classes: np.ndarray, number: int) -> Instances:
    place = generator.integers(len(truth), size=number)
    near = truth[place] + generator.normal(0, 0.1, (number, 4)) * np.tile(truth[place][:, 2:], 2)
    is_near = generator.random(number) < 0.5
    boxes = np.where(is_near[:, None], near, draw_boxes(generator, number))
    instances = Instances(SIZE)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].clip(1)], axis=1)
    instances.pred_boxes = Boxes(torch.from_numpy(corners))
    instances.scores = torch.from_numpy(generator.random(number) * np.where(is_near, 1.0, 0.5))
    labels = np.where(is_near, classes[place], generator.integers(NUM_CLASSES, size=number))
    instances.pred_classes = torch.from_numpy(labels)
    return instances
