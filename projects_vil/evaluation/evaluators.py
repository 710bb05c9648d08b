"""Build the evaluator of a dataset, and list its metrics."""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
    coco_evaluation,
)
from detectron2.utils import comm
from detectron2.utils.logger import log_first_n
from pycocotools.coco import COCO

from backbones import ConfigError
from backbones.errors import closest
from backbones.files import atomic_write
from projects_vil.config import is_panoptic, is_segmentor
from projects_vil.data.catalog import categories_of, class_order, label_reader
from projects_vil.data.records import SharedRecords, ground_truth
from projects_vil.evaluation.coco_matches import Matches, match_image, summarize
from projects_vil.evaluation.losses import LOSS_TASK, TOTAL_LOSS
from projects_vil.evaluation.results import check_finite

_COCO_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
# The metrics of detectron2's evaluators by evaluator_type.
_DETECTION_METRICS = {
    "coco": _COCO_METRICS,
    "coco_panoptic_seg": _COCO_METRICS,
    "lvis": (*_COCO_METRICS, "APr", "APc", "APf"),
    "pascal_voc": ("AP", "AP50", "AP75"),
}
# Number of images whose results a process sends to the main process at once.
_GATHERED_IMAGES = 200
RESULTS_FILE = "coco_instances_results.json"
# The metrics of SemSegEvaluator, for all classes and for each class.
_LABEL_METRICS = ("mIoU", "fwIoU", "mACC", "pACC")
_CLASS_METRICS = ("IoU", "ACC", "BoundaryIoU", "min(IoU, B-Iou)")


def build_evaluator(cfg: CfgNode, dataset_name: str, output_folder: str | None = None) -> DatasetEvaluator:
    """Build the evaluator of a dataset: COCO, LVIS, Pascal VOC or semantic segmentation, by its ``evaluator_type``.

    The things and stuff of a PanopticFPN are evaluated separately. The classes of the model are matched to the classes
    of the dataset by name.

    Args:
        cfg: The config of the model.
        dataset_name: A name in detectron2's catalog.
        output_folder: The folder for predictions. By default ``OUTPUT_DIR/inference``, or a folder with the name of the
            dataset in it if there are several test datasets.

    Raises:
        ConfigError: If the dataset has another type, ``DATASETS.CHECK`` rejects its annotations, or
            :func:`~projects_vil.data.class_order` raises.
    """
    if output_folder is None:
        parts = [dataset_name] if len(cfg.DATASETS.TEST) > 1 else []
        output_folder = os.path.join(cfg.OUTPUT_DIR, "inference", *parts)
    evaluator_type, evaluators = MetadataCatalog.get(dataset_name).get("evaluator_type"), []
    is_coco = evaluator_type in ("coco", "coco_panoptic_seg")
    if is_coco:
        options = {"masks": cfg.MODEL.MASK_ON, "check": cfg.DATASETS.CHECK}
        options |= {"output_dir": output_folder, "max_dets_per_image": cfg.TEST.DETECTIONS_PER_IMAGE}
        evaluators.append(COCOEvaluator(dataset_name, **options))
    elif evaluator_type == "lvis":
        evaluators.append(LVISEvaluator(dataset_name, output_dir=output_folder))
    elif evaluator_type == "pascal_voc":
        evaluators.append(PascalVOCDetectionEvaluator(dataset_name))
    if evaluator_type == "sem_seg" or (is_coco and is_panoptic(cfg)):
        read = label_reader(dataset_name)
        evaluators.append(SemSegEvaluator(dataset_name, output_dir=output_folder, sem_seg_loading_fn=read))
    if not evaluators:
        raise ConfigError(f"{dataset_name} is of type {evaluator_type!r}. Use coco, lvis, pascal_voc or sem_seg.")
    return CheckedEvaluator(evaluators, class_order(cfg, dataset_name))


class CheckedEvaluator(DatasetEvaluators):
    """Check the detections for evaluators, and map the class indices of the model to the classes of the dataset.

    A detection that is not finite raises a :class:`ConfigError`. Detections of classes that the dataset lacks are
    dropped.

    Args:
        evaluators: Evaluators for the classes of the dataset.
        order: The model's index of each class of the dataset (:func:`~projects_vil.data.class_order`); None if both
            have the same classes.
    """

    def __init__(self, evaluators: Sequence[DatasetEvaluator], order: Sequence[int] | None) -> None:
        super().__init__(evaluators)
        self.order = order

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        matched = []
        for record, output in zip(inputs, outputs, strict=True):
            if "instances" in output:
                instances = output["instances"].to("cpu")
                source = str(record.get("file_name", record.get("image_id")))
                check_finite(instances.pred_boxes.tensor, instances.scores, source=source)
                if self.order is not None:
                    is_class = instances.pred_classes[:, None] == torch.tensor(self.order)
                    rows, indices = is_class.nonzero(as_tuple=True)
                    instances = instances[rows]
                    instances.pred_classes = indices
                output = output | {"instances": instances}
            matched.append(output)
        super().process(inputs, matched)


class COCOEvaluator(coco_evaluation.COCOEvaluator):
    """detectron2's COCO evaluator with identical metrics and a small memory footprint. Without detections the AP is 0.

    Each process matches every image with pycocotools as soon as it is processed, and keeps about 40 bytes per
    detection. The main process gathers these records. It gathers the entries of ``coco_instances_results.json`` in
    small chunks. An image that was already processed, in the same or in another process, is ignored. Proposals are
    evaluated by detectron2.

    The annotations are read as in training. If an image has more objects than ``max_dets_per_image``, a warning gives
    the largest possible recall.

    Args:
        dataset_name: A name in detectron2's catalog.
        output_dir: The folder for ``coco_instances_results.json``.
        max_dets_per_image: Maximum number of detections per image and class.
        masks: Whether the detector has masks.
        check: The value of ``DATASETS.CHECK``.

    Raises:
        ConfigError: If the check rejects the annotations.
    """

    def __init__(
        self,
        dataset_name: str,
        *,
        output_dir: str,
        max_dets_per_image: int = 100,
        masks: bool = False,
        check: str = "error",
    ) -> None:
        truth = ground_truth(dataset_name, check=check, masks=masks)
        if truth is None:
            super().__init__(dataset_name, output_dir=output_dir, max_dets_per_image=max_dets_per_image)
            coco, self._coco_api = self._coco_api, None
            truth = SharedRecords((image, coco.imgToAnns[number]) for number, image in sorted(coco.imgs.items()))
            categories = coco.cats
        else:
            # detectron2's constructor always reads the annotation file, which may have errors that truth does not have.
            self._logger = logging.getLogger(coco_evaluation.__name__)
            self._distributed, self._output_dir, self._use_fast_impl = True, output_dir, False
            self._max_dets_per_image = [1, 10, max_dets_per_image]
            self._cpu_device = torch.device("cpu")
            self._metadata, self._kpt_oks_sigmas, self._do_evaluation = MetadataCatalog.get(dataset_name), (), False
            categories = self._metadata.thing_dataset_id_to_contiguous_id
        # Ids in the file may be text or large integers. They are replaced by positions, in the order of pycocotools.
        self.truth = truth
        self._category_of = {number: position for position, number in enumerate(sorted(categories))}
        self._image_of: dict[Any, int] = {}
        numbers, has_masks = [], masks
        for position, (image, objects) in enumerate(truth):
            self._do_evaluation = objects is not None
            self._image_of[image["id"]] = position
            numbers.append(sum(not one.get("iscrowd") for one in objects or ()))
            has_masks = has_masks and all("segmentation" in one for one in objects or ())
        # The tasks if there are no detections. Otherwise the detections determine them.
        self._tasks = ["bbox", "segm"] if has_masks else ["bbox"]
        _check_recall(dataset_name, numbers, max_dets_per_image)

    def reset(self) -> None:
        super().reset()
        # Image -> task -> matches. Images are numbered in the order of their ids.
        self._images: dict[int, dict[str, Any]] = {}
        if self._output_dir:
            os.makedirs(self._output_dir, exist_ok=True)
            # One line per image, in an unnamed file that is deleted when the process ends.
            self._results_file = tempfile.TemporaryFile("w+", dir=self._output_dir)

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        super().process(inputs, outputs)
        ids = {index: number for number, index in self._metadata.get("thing_dataset_id_to_contiguous_id", {}).items()}
        for one in [one for one in self._predictions if "instances" in one]:
            self._predictions.remove(one)
            for result in one["instances"] if ids else ():
                result["category_id"] = ids[result["category_id"]]
            self.add(one["image_id"], one["instances"])

    def add(self, image_id: int | str, results: list[dict[str, Any]]) -> None:
        """Add the detections of an image in COCO's results format, with the category ids of the dataset."""
        image = self._image_of[image_id]
        if image not in self._images:
            tasks = self._tasks_from_predictions(results) if results and self._do_evaluation else ()
            ids = {"image_id": image}
            own = [one | ids | {"category_id": self._category_of[one["category_id"]]} for one in results]
            self._images[image] = {task: self._match(image, own, task) for task in tasks}
            if self._output_dir:
                self._results_file.write(json.dumps(results)[1:-1] + "\n")

    def _match(self, position: int, results: list[dict[str, Any]], task: str) -> Matches:
        """Match the results of an image, which have positions instead of ids."""
        image, objects = self.truth[position]
        own = [
            one | {"id": index, "image_id": position, "category_id": self._category_of.get(one["category_id"], -1)}
            for index, one in enumerate(objects or (), start=1)
        ]
        return match_image(image | {"id": position}, own, results, task, self._max_dets_per_image)

    def evaluate(self) -> dict[str, Any]:
        if any(comm.all_gather(bool(self._predictions))):
            if comm.is_main_process():
                images, objects = zip(*self.truth, strict=True)
                annotations = list(chain.from_iterable(filter(None, objects)))
                categories = [{"id": number} for number in self._category_of]
                self._coco_api = COCO()
                self._coco_api.dataset = {"images": images, "annotations": annotations, "categories": categories}
                self._coco_api.createIndex()
            return super().evaluate()
        repeated = set().union(*comm.all_gather(np.array(list(self._images), int))[: comm.get_rank()])
        if self._output_dir:
            self._write_results(repeated)
        if not self._do_evaluation:
            self._logger.info("Annotations are not available for evaluation.")
            return {}
        own = [tasks for number, tasks in self._images.items() if number not in repeated]
        results, classes = {}, self._metadata.get("thing_classes")
        for task in sorted(set().union(*comm.all_gather(set().union(*own)))) or self._tasks:
            matches = zip(*(tasks.pop(task) for tasks in own if task in tasks), strict=True)
            parts = comm.gather(tuple(map(np.concatenate, matches)))
            if comm.is_main_process():
                if not (parts := list(filter(None, parts))):
                    self._logger.warning("The model has no detections. Train longer, or lower the score threshold.")
                # Objects in images without detections count too.
                seen = {image for found, _ in parts for image in np.unique(found["image"])}
                parts += [self._match(image, [], task) for image in self._image_of.values() if image not in seen]
                evaluation = summarize(parts, task, list(self._category_of.values()), self._max_dets_per_image)
                results[task] = self._derive_coco_results(evaluation, task, class_names=classes)
        return results

    def _write_results(self, left_out: set[int]) -> None:
        """Gather the results of all processes in chunks, and write them in the main process."""
        self._results_file.seek(0)
        lines = zip(self._images, self._results_file, strict=True)
        own = (line.strip() for number, line in lines if number not in left_out)
        path, is_main, separator = Path(self._output_dir) / RESULTS_FILE, comm.is_main_process(), ""
        with atomic_write(path) if is_main else nullcontext(os.devnull) as partial, open(partial, "w") as file:
            file.write("[")
            for rank, number in enumerate(comm.all_gather(len(self._images))):
                for _ in range(0, number, _GATHERED_IMAGES):
                    lines = islice(own, _GATHERED_IMAGES if rank == comm.get_rank() else 0)
                    for part in filter(None, comm.gather(", ".join(filter(None, lines)))):
                        file.write(separator + part)
                        separator = ", "
            file.write("]")
        self._results_file.close()


def _check_recall(dataset_name: str, numbers: list[int], limit: int) -> None:
    """Warn if images have more objects (``numbers``) than the detections that are evaluated, which limits recall."""
    if (most := max(numbers, default=0)) > limit:
        share = sum(min(number, limit) for number in numbers) / sum(numbers)
        text = f"{dataset_name} has up to {most} objects in an image, but TEST.DETECTIONS_PER_IMAGE is {limit}, so "
        text += f"recall can be at most {100 * share:.1f}%. To raise AP and AR, set TEST.DETECTIONS_PER_IMAGE {most}."
        log_first_n(logging.WARNING, text, name=__name__, key="message")


# Metric names --------------------------------------------------------------------------------------------------------


def check_metric(cfg: CfgNode) -> None:
    """Raise a :class:`ConfigError` unless an evaluation has the metric ``TEST.BEST_METRIC``.

    Args:
        cfg: A config whose ``DATASETS.TEST`` are registered.
    """
    dataset, metric = split_metric_name(cfg)
    if metric.startswith(f"{LOSS_TASK}/") and not cfg.TEST.VALIDATION_LOSS:
        raise ConfigError(f"TEST.BEST_METRIC '{metric}' needs the validation loss. Set TEST.VALIDATION_LOSS True.")
    names = metric_names(cfg, dataset)
    if metric not in names and not metric.startswith(f"{LOSS_TASK}/loss_"):
        hint = closest(metric, names, most=3) or "."
        raise ConfigError(f"TEST.BEST_METRIC '{metric}' is not a metric of {dataset}{hint} Use one such as {names[0]}.")


def split_metric_name(cfg: CfgNode) -> tuple[str, str]:
    """Return the dataset of ``TEST.BEST_METRIC`` and the metric, ``task/name``.

    If ``DATASETS.TEST`` has several datasets, the metric may start with one of them. The default is the first dataset.
    """
    metric, tests = cfg.TEST.BEST_METRIC, cfg.DATASETS.TEST
    dataset = next((name for name in tests[1:] if metric.startswith(f"{name}/")), tests[0])
    return dataset, metric.removeprefix(f"{dataset}/") if len(tests) > 1 else metric


def metric_names(cfg: CfgNode, dataset: str) -> list[str]:
    """Return the metrics of an evaluation on a registered dataset as ``task/name``. Losses of parts are left out."""
    metadata, names = MetadataCatalog.get(dataset), []
    if not is_segmentor(cfg):
        evaluator_type, things = metadata.get("evaluator_type"), categories_of(dataset).values()
        metrics = _DETECTION_METRICS.get(evaluator_type, ())
        # detectron2's COCO evaluator has no separate metrics for a single class.
        if metrics is _COCO_METRICS and len(things) > 1:
            metrics = [*metrics, *(f"AP-{name}" for name in things)]
        has_heads = is_panoptic(cfg) or cfg.MODEL.META_ARCHITECTURE == "GeneralizedRCNN"
        has_masks = has_heads and cfg.MODEL.MASK_ON and evaluator_type != "pascal_voc"
        tasks = {"bbox": True, "segm": has_masks, "keypoints": has_heads and cfg.MODEL.KEYPOINT_ON}
        pairs = [(task, metric) for task, has_task in tasks.items() if has_task for metric in metrics]
        # COCO has no keypoints of small objects.
        names += [f"{task}/{metric}" for task, metric in pairs if (task, metric) != ("keypoints", "APs")]
    if is_segmentor(cfg) or is_panoptic(cfg):
        metrics = [f"{metric}-{name}" for metric in _CLASS_METRICS for name in metadata.get("stuff_classes", ())]
        names += [f"sem_seg/{metric}" for metric in (*_LABEL_METRICS, *metrics)]
    return [*names, f"{LOSS_TASK}/{TOTAL_LOSS}"]
