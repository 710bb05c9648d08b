"""Run COCO's evaluation image by image: match with pycocotools, keep flat arrays, and accumulate at the end."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.evaluation.coco_evaluation import COCOevalMaxDets
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

Entry = dict[str, Any]
# The result of match_image, for one or several images.
Matches = tuple[np.ndarray, np.ndarray]
_PAIR = [("image", np.int64), ("category", np.int32)]


def match_image(
    image: Entry, annotations: list[Entry], results: list[Entry], task: str, max_detections: Sequence[int]
) -> Matches:
    """Match the results of one image to its annotations with pycocotools.

    Args:
        image: The entry of the image in the COCO file.
        annotations: Its annotations. pycocotools modifies them.
        results: Detections in COCO's results format.
        task: ``"bbox"``, ``"segm"`` or ``"keypoints"``.
        max_detections: ``maxDets`` of COCOeval. Keypoints use COCOeval's default.

    Returns:
        Two arrays. The first has a record per detection: image, category, score, rank within the category, and for each
        of A area ranges two bit masks over the IoU thresholds, ``matched`` and ``ignored``. The second has a record per
        category: image, category, and for each area range the number of objects that are not ignored.
    """
    # As in detectron2, the area of a mask is its number of pixels, not the area of its box.
    unused = "bbox" if task == "segm" else None
    results = [{key: value for key, value in one.items() if key != unused} for one in results]
    categories = [{"id": number} for number in {one["category_id"] for one in (*annotations, *results)}]
    truth = COCO()
    truth.dataset = {"images": [image], "annotations": annotations, "categories": categories}
    # pycocotools prints progress lines.
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results) if results else COCO(), task)
        parameters = evaluation.params
        if task != "keypoints":
            parameters.maxDets = max_detections
        evaluation.evaluate()
    num_areas, bits = len(parameters.areaRng), 1 << np.arange(len(parameters.iouThrs))
    rows, objects = [], []
    for start in range(0, len(evaluation.evalImgs), num_areas):
        areas = evaluation.evalImgs[start : start + num_areas]
        pair, scores = (image["id"], areas[0]["category_id"]), areas[0]["dtScores"]
        matched, ignored = ([bits @ (one[key] != 0) for one in areas] for key in ("dtMatches", "dtIgnore"))
        columns = zip(scores, range(len(scores)), np.transpose(matched), np.transpose(ignored), strict=True)
        rows += [(*pair, *row) for row in columns]
        objects.append((*pair, [(one["gtIgnore"] == 0).sum() for one in areas]))
    bits = [(name, np.uint16, num_areas) for name in ("matched", "ignored")]
    found = np.array(rows, [*_PAIR, ("score", np.float64), ("rank", np.uint16), *bits])
    return found, np.array(objects, [*_PAIR, ("objects", np.int32, num_areas)])


def summarize(matches: list[Matches], task: str, categories: list[int], max_detections: Sequence[int]) -> COCOeval:
    """Accumulate matches, print COCO's table and return the COCOeval.

    Precision, recall and scores are bitwise identical to ``COCOeval.accumulate``.

    Args:
        matches: The matches of all images, in any order.
        task, max_detections: As for :func:`match_image`.
        categories: All category ids.
    """
    evaluation = (COCOeval if max_detections[2] == 100 else COCOevalMaxDets)(iouType=task)
    parameters = evaluation.params
    parameters.catIds = sorted(categories)
    if task != "keypoints":
        parameters.maxDets = sorted(max_detections)
    # (IoU, recall, class, area, detections)
    shape = [len(getattr(parameters, name)) for name in ("iouThrs", "recThrs", "catIds", "areaRng", "maxDets")]
    tables = {name: -np.ones(shape) for name in ("precision", "scores")} | {"recall": -np.ones(shape[:1] + shape[2:])}
    for index, category in enumerate(parameters.catIds):
        parts = ([table[table["category"] == category] for table in tables] for tables in zip(*matches, strict=True))
        own, objects = map(np.concatenate, parts)
        # Detections with equal scores are sorted by image id.
        own = own[np.lexsort([own["rank"], own["image"], -own["score"]])]
        numbers = objects["objects"].sum(axis=0)
        for limit, most in enumerate(parameters.maxDets):
            rows = own[own["rank"] < most]
            for area in np.flatnonzero(numbers):
                matched, counts = rows["matched"][:, area], ~rows["ignored"][:, area]
                for iou in range(shape[0]):
                    both = (matched & counts, ~matched & counts)
                    true, false = (np.cumsum(bits >> iou & 1).astype(float) for bits in both)
                    recall, precision = true / numbers[area], true / (false + true + np.spacing(1))
                    precision = np.maximum.accumulate(precision[::-1])[::-1]
                    at = np.searchsorted(recall, parameters.recThrs)
                    reached = at < len(rows)
                    tables["recall"][iou, index, area, limit] = recall[-1] if len(rows) else 0
                    for name, values in (("precision", precision), ("scores", rows["score"])):
                        tables[name][iou, :, index, area, limit] = 0
                        tables[name][iou, reached, index, area, limit] = values[at[reached]]
    results = {"params": parameters, "counts": shape, **tables}
    evaluation.eval = results  # type: ignore[typeddict-item]  # the stub lists the keys, which tables has
    evaluation.summarize()
    return evaluation
