"""Precision, recall and confusions of a run's detections, from the arrays of pycocotools' COCOeval."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from backbones.errors import ConfigError

IOU_THRESHOLD = 0.5  # smallest IoU of true positives in confusions and drawings


@dataclass(frozen=True)
class ImageMatches:
    """Detections above the score threshold and objects of one image; objects that COCOeval ignores are left out."""

    image: dict[str, Any]
    true_positives: list[tuple[dict, dict]]  # (detection, object)
    false_positives: list[dict]
    missed: list[dict]


@dataclass(frozen=True)
class DetectionMetrics:
    """COCO's evaluation of the C categories of a dataset, by id.

    Attributes:
        categories: categories of the COCO file.
        precision: task -> (IoU 0.50 to 0.95, recall 0 to 1, C, all and each size), in [0, 1]; -1 without objects.
        num_objects: (C, all and each size), without crowds.
        threshold, f1: the score at which F1 of boxes over all classes is highest, and F1 there.
        images: matches of boxes at this threshold and an IoU of 0.5.
    """

    categories: list[dict[str, Any]]
    precision: dict[str, np.ndarray]
    num_objects: np.ndarray
    threshold: float
    f1: float
    images: list[ImageMatches]

    def ap(self, task: str, *, iou: float | None = None, category: int | None = None, size: int = 0) -> float:
        """Return AP in percent of all classes or the class at an index; nan without objects."""
        values = self._precision(task, iou, category)[..., size]
        return float(100 * values[values > -1].mean()) if (values > -1).any() else float("nan")

    def curve(self, task: str, *, iou: float | None = None, category: int | None = None) -> np.ndarray:
        """Return recall and precision (101, 2), the mean over classes with objects; (0, 2) without any."""
        values = self._precision(task, iou, category)[..., 0]
        values = values[..., (values > -1).all(axis=(0, 1))]
        if not values.size:
            return np.zeros((0, 2))
        return np.stack([np.linspace(0, 1, values.shape[1]), values.mean(axis=(0, 2))], axis=1)

    def _precision(self, task: str, iou: float | None, category: int | None) -> np.ndarray:
        row = None if iou is None else round((iou - 0.5) / 0.05)
        table = self.precision[task] if row is None else self.precision[task][row : row + 1]
        return table if category is None else table[:, :, category : category + 1]


def evaluate_detections(annotations: dict[str, Any], results: str | Path, *, max_detections: int) -> DetectionMetrics:
    """Evaluate ``coco_instances_results.json`` on the content of a COCO file by pycocotools.

    Args:
        max_detections: per image and class.

    Raises:
        ConfigError: for results that are empty, damaged, or of another dataset.
    """
    try:
        detections = json.loads(Path(results).read_bytes())
        if detections == []:
            raise ConfigError(f"{results} has no detections")
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO()
            coco.dataset = annotations
            coco.createIndex()
            tasks = ["bbox", "segm"] if all("segmentation" in item for item in detections) else ["bbox"]
            evaluations = {task: _run_cocoeval(coco, detections, task, max_detections) for task in tasks}
    except ConfigError:
        raise
    except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{results} is damaged, or does not fit the dataset ({error!r})") from error
    evaluation = evaluations["bbox"]
    parameters = evaluation.params
    entries = np.array(evaluation.evalImgs, dtype=object)
    entries = entries.reshape(len(parameters.catIds), len(parameters.areaRng), len(parameters.imgIds))
    num_objects = np.zeros(entries.shape[:2], int)
    for (category, area, _), entry in np.ndenumerate(entries):
        if entry is not None:
            num_objects[category, area] += int((entry["gtIgnore"] == 0).sum())
    entries = [entry for entry in entries[:, 0].flat if entry is not None]
    matches = _matches(entries)
    threshold, f1 = _best_threshold(matches, int(num_objects[:, 0].sum()))
    return DetectionMetrics(
        categories=coco.loadCats(parameters.catIds),
        precision={task: each.eval["precision"][..., -1] for task, each in evaluations.items()},
        num_objects=num_objects,
        threshold=threshold,
        f1=f1,
        images=_by_image(evaluation, entries, [match for match in matches if match[0] >= threshold]),
    )


def confusion_matrix(metrics: DetectionMetrics) -> np.ndarray:
    """Return counts (C + 1, C + 1): rows are classes of objects, columns classes of detections, the last background.

    COCOeval matches within a class. Detections and objects that it leaves unmatched are then matched across classes
    by the same IoU, in the order of the scores.
    """
    row_of = {category["id"]: row for row, category in enumerate(metrics.categories)}
    background = len(row_of)
    counts = np.zeros((background + 1, background + 1), int)
    for image in metrics.images:
        pairs = [(found["category_id"], target["category_id"]) for found, target in image.true_positives]
        missed = list(image.missed)
        for found in image.false_positives:
            ious = mask_util.iou([found["bbox"]], [target["bbox"] for target in missed], [0] * len(missed))
            best = int(np.argmax(ious)) if missed else -1
            is_match = bool(missed) and ious[0, best] >= IOU_THRESHOLD
            pairs.append((found["category_id"], missed.pop(best)["category_id"] if is_match else None))
        pairs += [(None, target["category_id"]) for target in missed]
        for found, target in pairs:
            counts[row_of.get(target, background), row_of.get(found, background)] += 1
    return counts


def _run_cocoeval(coco: COCO, detections: list[dict[str, Any]], task: str, max_detections: int) -> COCOeval:
    # As detectron2's COCOEvaluator: the area of a mask is that of its pixels, not that of its box.
    unused = {"bbox": "segmentation", "segm": "bbox"}[task]
    copies = [{key: value for key, value in item.items() if key != unused} for item in detections]
    evaluation = COCOeval(coco, coco.loadRes(copies), task)
    evaluation.params.maxDets = [1, 10, max_detections]
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _matches(entries: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Return (score, id of the detection, id of its object or 0) by descending score, without ignored detections."""
    found = []
    for entry in entries:
        columns = entry["dtScores"], entry["dtIds"], entry["dtMatches"][0].astype(int).tolist(), entry["dtIgnore"][0]
        found += [match[:3] for match in zip(*columns, strict=True) if not match[3]]
    return sorted(found, key=lambda match: -match[0])


def _best_threshold(matches: list[tuple[float, int, int]], num_objects: int) -> tuple[float, float]:
    """Return the score with the highest F1, and F1; without true positives as many detections as objects are kept."""
    if not matches:
        return 0.5, 0.0
    scores = np.array([match[0] for match in matches])
    true_positives = np.cumsum([match[2] > 0 for match in matches])
    f1 = 2 * true_positives / (np.arange(1, len(matches) + 1) + num_objects)
    f1[:-1][scores[:-1] == scores[1:]] = -1  # a threshold keeps all detections of one score
    best = int(f1.argmax()) if true_positives[-1] else min(max(num_objects, 1), len(scores)) - 1
    return float(scores[best]), max(float(f1[best]), 0.0)


def _by_image(evaluation: COCOeval, entries: list[dict], matches: list[tuple[float, int, int]]) -> list[ImageMatches]:
    objects, detections = evaluation.cocoGt, evaluation.cocoDt
    by_image = {number: ImageMatches(objects.imgs[number], [], [], []) for number in sorted(objects.imgs)}
    matched = {target for _, _, target in matches}
    for _, number, target in matches:
        detection = detections.anns[number]
        image = by_image[detection["image_id"]]
        if target:
            image.true_positives.append((detection, objects.anns[target]))
        else:
            image.false_positives.append(detection)
    for entry in entries:
        for number, ignored in zip(entry["gtIds"], entry["gtIgnore"], strict=True):
            if not ignored and number not in matched:
                by_image[entry["image_id"]].missed.append(objects.anns[number])
    return list(by_image.values())
