"""What a run's detections are worth beside the dataset's annotations: curves, classes, sizes, confusions."""

import contextlib
import io
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from backbones.utils.errors import InputError

IOU = 0.5  # of a hit with its object
SIZES = {"small": "below 32²", "medium": "32² to 96²", "large": "above 96²"}


@dataclass(frozen=True)
class Precision:
    """COCO's evaluation of one task, over C classes by id; -1 where there is nothing to find."""

    # (IoU 0.50 to 0.95, recall 0 to 1, C, all and each size): precision in [0, 1]
    table: np.ndarray

    def ap(self, *, iou: float | None = None, size: int = 0) -> float:
        """AP in percent over all classes; nan where there is nothing to find."""
        return _mean(self._at(iou)[..., size])

    def class_ap(self, index: int, *, iou: float | None = None) -> float:
        return _mean(self._at(iou)[:, :, index, 0])

    def curve(self, *, iou: float | None = None, index: int | None = None) -> np.ndarray:
        """Precision (101,) at recall 0, 0.01 to 1: of one class, or the mean of those that have objects."""
        table = self._at(iou)[..., 0]
        table = table if index is None else table[..., index : index + 1]
        table = table[..., (table > -1).all(axis=(0, 1))]
        return table.mean(axis=(0, 2)) if table.size else np.zeros(0)

    def _at(self, iou: float | None) -> np.ndarray:
        row = None if iou is None else round((iou - 0.5) / 0.05)
        return self.table if row is None else self.table[row : row + 1]


@dataclass(frozen=True)
class Matched:
    """Objects and detections of one image, the detections by falling score."""

    image: dict[str, Any]
    objects: list[dict[str, Any]]
    detections: list[dict[str, Any]]
    # Of each detection the object of its class that it hits, or -1; and whether it lies in a crowd, which counts as
    # neither right nor wrong.
    hits: np.ndarray
    in_crowd: np.ndarray
    # (detections, objects) in [0, 1]
    ious: np.ndarray

    def above(self, threshold: float) -> list[int]:
        """The detections that count at a threshold."""
        return [
            index
            for index, item in enumerate(self.detections)
            if item["score"] >= threshold and not self.in_crowd[index]
        ]


@dataclass(frozen=True)
class Judged:
    """Detections of a dataset beside its annotations."""

    classes: list[str]
    class_ids: list[int]
    # Objects of each class and of each size, without crowds.
    objects_by_class: list[int]
    objects_by_size: dict[str, int]
    by_task: dict[str, Precision]
    images: list[Matched]
    # The score with the best F1 over all classes, and F1 there.
    threshold: float
    f1: float


def judge(annotations: Path, results: Path, *, max_detections: int) -> Judged:
    """Evaluate as pycocotools does, and match detections to objects at an IoU of 0.5.

    Args:
        annotations: the dataset's COCO file.
        results: ``coco_instances_results.json`` of an evaluation on it.
        max_detections: of an image.

    Raises:
        InputError: where a file cannot be read, or the two do not belong together.
    """
    found = _read_results(results)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(str(annotations))
            tasks = ["bbox", *(["segm"] if all("segmentation" in item for item in found) else [])]
            by_task = {task: _evaluate(coco, found, task, max_detections) for task in tasks}
        images = _match_images(coco, found)
    except OSError as error:
        raise InputError(f"{annotations} cannot be read ({error.strerror})") from error
    except (AssertionError, KeyError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{results} and {annotations} do not belong together, or one is damaged") from error
    categories = coco.loadCats(sorted(coco.getCatIds()))
    ids = [category["id"] for category in categories]
    objects = [item for image in images for item in image.objects]
    areas = np.array([item["area"] for item in objects])
    small, large = (areas < 32**2), (areas > 96**2)
    threshold, f1 = _best_threshold(images, len(objects))
    return Judged(
        classes=[str(category["name"]) for category in categories],
        class_ids=ids,
        objects_by_class=[sum(item["category_id"] == number for item in objects) for number in ids],
        objects_by_size=dict(zip(SIZES, map(int, (small.sum(), (~small & ~large).sum(), large.sum())), strict=True)),
        by_task=by_task,
        images=images,
        threshold=threshold,
        f1=f1,
    )


def confusions(judged: Judged) -> np.ndarray:
    """Counts (C + 1, C + 1) at the threshold: rows are objects' classes, columns what was found there.

    The last row is where nothing is, the last column is what nothing found. Who finds an object of its class hits it;
    what then remains on both sides is paired at the same IoU, best scores first.
    """
    index = {number: row for row, number in enumerate(judged.class_ids)}
    nothing = len(index)
    counts = np.zeros((nothing + 1, nothing + 1), int)
    for image in judged.images:
        taken = _pairs(image, judged.threshold)
        for row, item in enumerate(image.objects):
            partner = next((detection for detection, number in taken.items() if number == row), None)
            column = nothing if partner is None else index[image.detections[partner]["category_id"]]
            counts[index[item["category_id"]], column] += 1
        for detection in image.above(judged.threshold):
            if detection not in taken:
                counts[nothing, index[image.detections[detection]["category_id"]]] += 1
    return counts


def _pairs(image: Matched, threshold: float) -> dict[int, int]:
    """Detections and the objects that they found, of their own class or of another."""
    counting = image.above(threshold)
    taken = {number: int(image.hits[number]) for number in counting if image.hits[number] >= 0}
    for number in counting:
        free = [row for row in range(len(image.objects)) if row not in taken.values()]
        if number not in taken and free:
            best = max(free, key=lambda row: image.ious[number, row])
            if image.ious[number, best] >= IOU:
                taken[number] = best
    return taken


def _read_results(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: it is not JSON") from error
    needed = {"image_id", "category_id", "bbox", "score"}
    if not isinstance(found, list) or not all(isinstance(item, dict) and needed <= item.keys() for item in found):
        raise InputError(f"{path} is no list of COCO results")
    if not found:
        raise InputError(f"{path} has no detection")
    return found


def _evaluate(coco: COCO, found: list[dict[str, Any]], task: str, max_detections: int) -> Precision:
    # A copy, since loadRes writes into what it is given; without boxes the areas of masks are those of masks.
    items = [{key: value for key, value in item.items() if task == "bbox" or key != "bbox"} for item in found]
    if task == "bbox":
        items = [{key: value for key, value in item.items() if key != "segmentation"} for item in items]
    evaluation = COCOeval(coco, coco.loadRes(items), task)
    evaluation.params.maxDets = [1, 10, max_detections]
    evaluation.evaluate()
    evaluation.accumulate()
    return Precision(evaluation.eval["precision"][..., -1])


def _match_images(coco: COCO, found: list[dict[str, Any]]) -> list[Matched]:
    by_image = defaultdict(list)
    for item in sorted(found, key=lambda item: -item["score"]):
        by_image[item["image_id"]].append(item)
    return [_match(coco.imgs[number], coco.imgToAnns.get(number, []), by_image[number]) for number in sorted(coco.imgs)]


def _match(image: dict, annotations: list[dict], detections: list[dict]) -> Matched:
    objects = [item for item in annotations if not item.get("iscrowd")]
    crowds = [item for item in annotations if item.get("iscrowd")]
    boxes = [item["bbox"] for item in detections]
    ious = _iou(boxes, [item["bbox"] for item in objects], crowd=0)
    hits, taken = np.full(len(boxes), -1), set()
    for number, item in enumerate(detections):
        free = [
            row
            for row, other in enumerate(objects)
            if row not in taken and other["category_id"] == item["category_id"] and ious[number, row] >= IOU
        ]
        if free:
            hits[number] = max(free, key=lambda row: ious[number, row])
            taken.add(hits[number])
    in_crowd = (_iou(boxes, [item["bbox"] for item in crowds], crowd=1) >= IOU).any(axis=1) & (hits < 0)
    return Matched(image=image, objects=objects, detections=detections, hits=hits, in_crowd=in_crowd, ious=ious)


def _iou(boxes: list, others: list, *, crowd: int) -> np.ndarray:
    if not boxes or not others:
        return np.zeros((len(boxes), len(others)))
    return np.asarray(mask_util.iou(np.array(boxes, float), np.array(others, float), [crowd] * len(others)))


def _best_threshold(images: list[Matched], num_objects: int) -> tuple[float, float]:
    """The score with the best F1, and F1; where nothing hits, one that leaves as many detections as objects."""
    pairs = [
        (item["score"], image.hits[index] >= 0)
        for image in images
        for index, item in enumerate(image.detections)
        if not image.in_crowd[index]
    ]
    if not pairs:
        return 0.5, 0.0
    scores, hits = map(np.array, zip(*sorted(pairs, key=lambda pair: -pair[0]), strict=True))
    f1 = 2 * hits.cumsum() / (np.arange(1, len(hits) + 1) + num_objects)
    # Among equal scores all count.
    f1[:-1][scores[:-1] == scores[1:]] = -1
    best = int(f1.argmax()) if hits.any() else min(max(num_objects, 1), len(scores)) - 1
    return float(scores[best]), max(float(f1[best]), 0.0)


def _mean(table: np.ndarray) -> float:
    known = table[table > -1]
    return float(100 * known.mean()) if known.size else float("nan")
