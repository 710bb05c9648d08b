"""Compute precision, recall and the confusion matrix of a run from the arrays of pycocotools' COCOeval."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from backbones.errors import ConfigError, explained_errors
from projects_vil.evaluation import check_finite
from projects_vil.files import read_json
from vil.choices import SCORE_THRESHOLD

IOU_THRESHOLD = 0.5  # smallest IoU of true positives in the confusion matrix and in drawings


# A true positive and its object, a false positive and None, or None and a false negative.
Match = tuple[dict[str, Any] | None, dict[str, Any] | None]


@dataclass(frozen=True)
class DetectionMetrics:
    """COCO's evaluation of a dataset with C categories, sorted by id.

    Attributes:
        categories: The categories of the COCO file.
        precision: Task -> (IoU 0.50 to 0.95, recall 0 to 1, C, all sizes and each size), in [0, 1]; -1 without objects.
        num_objects: (C, all sizes and each size), without crowds.
        threshold, f1: The score threshold with the highest F1 of boxes over all classes, and this F1.
        images: Each image with its matches of boxes at this threshold and an IoU of 0.5, by descending score. Objects
            and detections that COCOeval ignores are omitted.
    """

    categories: list[dict[str, Any]]
    precision: dict[str, np.ndarray]
    num_objects: np.ndarray
    threshold: float
    f1: float
    images: list[tuple[dict[str, Any], list[Match]]]

    def curve(self, task: str, *, iou: float | None = None, category: int | None = None) -> np.ndarray:
        """Return recall and precision (101, 2), averaged over classes with objects; (0, 2) without objects."""
        row = slice(None) if iou is None else [round((iou - 0.5) / 0.05)]
        values = self.precision[task][row, :, :, 0]
        values = values if category is None else values[..., [category]]
        values = values[..., (values > -1).all(axis=(0, 1))]
        if not values.size:
            return np.zeros((0, 2))
        return np.stack([np.linspace(0, 1, values.shape[1]), values.mean(axis=(0, 2))], axis=1)


def evaluate_detections(annotations: dict[str, Any], results: str | Path, *, max_detections: int) -> DetectionMetrics:
    """Evaluate ``coco_instances_results.json`` on the content of a COCO file with pycocotools.

    Args:
        annotations: The content of the COCO file.
        results: The results file.
        max_detections: Maximum number of detections per image and class.

    Raises:
        ConfigError: If the results are empty, damaged, or of another dataset.
    """
    with explained_errors(results, "is damaged, or belongs to another dataset", "Evaluate again."):
        detections = read_json(results)
        if detections == []:
            raise ConfigError(f"'{results}' is empty: no detection is above the score threshold. Train longer.")
        boxes, scores = ([item[key] for item in detections] for key in ("bbox", "score"))
        check_finite(boxes, scores, source=str(results))
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO()
            # COCOeval converts ids to floats, so that ids that are text or large integers must be replaced.
            objects = [item | {"id": index} for index, item in enumerate(annotations["annotations"], start=1)]
            coco.dataset = annotations | {"annotations": objects}
            coco.createIndex()
            evaluations = {}
            for task in ["bbox", "segm"] if all("segmentation" in item for item in detections) else ["bbox"]:
                if task == "segm":
                    # COCO would take the area of the box instead of the area of the mask.
                    detections = [{key: item[key] for key in item if key != "bbox"} for item in detections]
                evaluations[task] = COCOeval(coco, coco.loadRes(detections), task)
                evaluations[task].params.maxDets = [1, 10, max_detections]
                evaluations[task].evaluate()
                evaluations[task].accumulate()
    evaluation = evaluations["bbox"]
    parameters = evaluation.params
    entries = np.array(evaluation.evalImgs, dtype=object)
    entries = entries.reshape(len(parameters.catIds), len(parameters.areaRng), len(parameters.imgIds))
    num_objects = np.zeros(entries.shape[:2], int)
    for (category, area, _), entry in np.ndenumerate(entries):
        num_objects[category, area] += 0 if entry is None else (entry["gtIgnore"] == 0).sum()
    entries = [entry for entry in entries[:, 0].flat if entry is not None]
    objects, detections = coco.anns, evaluation.cocoDt.anns
    matches: list[Match] = []
    for entry in entries:
        columns = zip(entry["dtIds"], entry["dtMatches"][0].astype(int), entry["dtIgnore"][0], strict=True)
        for row, target, ignored in columns:
            if not ignored:
                # COCOeval writes 0 for unmatched detections, even if an object has the id 0.
                matches.append((detections[row], objects[target] if target else None))
    matches.sort(key=lambda match: -match[0]["score"])
    threshold, f1 = _best_threshold(matches, int(num_objects[:, 0].sum()))
    matches = [match for match in matches if match[0]["score"] >= threshold]
    detected = {target["id"] for _, target in matches if target}
    for entry in entries:
        columns = zip(entry["gtIds"], entry["gtIgnore"], strict=True)
        matches += [(None, objects[row]) for row, ignored in columns if not ignored and row not in detected]
    by_image: dict[int, list[Match]] = {number: [] for number in sorted(coco.imgs)}
    for match in matches:
        by_image[(match[0] or match[1])["image_id"]].append(match)
    return DetectionMetrics(
        categories=coco.loadCats(parameters.catIds),
        precision={task: each.eval["precision"][..., -1] for task, each in evaluations.items()},
        num_objects=num_objects,
        threshold=threshold,
        f1=f1,
        images=[(coco.imgs[number], own) for number, own in by_image.items()],
    )


def confusion_matrix(metrics: DetectionMetrics) -> np.ndarray:
    """Return the confusion matrix (C + 1, C + 1): rows are true classes, columns predicted classes, background is last.

    COCOeval matches within a class. The remaining detections and objects are matched across classes with the same IoU
    threshold, by descending score.
    """
    row_of = {category["id"]: row for row, category in enumerate(metrics.categories)}
    background = len(row_of)
    counts = np.zeros((background + 1, background + 1), int)
    for _, matches in metrics.images:
        missed = [target for detection, target in matches if detection is None]
        for detection, target in matches:
            if detection is None:
                continue
            if target is None and missed:
                ious = mask_util.iou([detection["bbox"]], [each["bbox"] for each in missed], [0] * len(missed))[0]
                target = missed.pop(int(ious.argmax())) if ious.max() >= IOU_THRESHOLD else None
            row = background if target is None else row_of[target["category_id"]]
            counts[row, row_of[detection["category_id"]]] += 1
        for target in missed:
            counts[row_of[target["category_id"]], background] += 1
    return counts


def _best_threshold(matches: list[Match], num_objects: int) -> tuple[float, float]:
    """Return the score with the highest F1, and this F1. Without true positives, keep one detection per object."""
    if not matches:
        return SCORE_THRESHOLD, 0.0
    scores = np.array([detection["score"] for detection, _ in matches])
    true_positives = np.cumsum([target is not None for _, target in matches])
    f1 = 2 * true_positives / (np.arange(1, len(matches) + 1) + num_objects)
    f1[:-1][scores[:-1] == scores[1:]] = -1  # a threshold keeps all detections with the same score
    best = int(f1.argmax()) if true_positives[-1] else min(max(num_objects, 1), len(scores)) - 1
    return float(scores[best]), max(float(f1[best]), 0.0)
