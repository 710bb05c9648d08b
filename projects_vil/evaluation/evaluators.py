"""Build the evaluator of a dataset, and list its metrics."""

import functools
import importlib.util
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
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
from backbones.checkpoint_files import atomic_write
from backbones.errors import check_choice, closest
from projects_vil.config import is_panoptic, is_segmentor
from projects_vil.data import class_names, class_order, ground_truth, label_reader
from projects_vil.evaluation.coco_matches import Matches, match_image, summarize
from projects_vil.evaluation.losses import LOSS_TASK, TOTAL_LOSS
from projects_vil.evaluation.results import check_finite

COCO_APIS = ("pycocotools", "faster_coco_eval")
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
_LABEL_METRICS = ("mIoU", "fwIoU", "mACC", "pACC")


def build_evaluator(cfg: CfgNode, dataset_name: str, output_folder: str) -> DatasetEvaluator:
    """Build the evaluator of a dataset: COCO, LVIS, Pascal VOC or semantic segmentation, by its ``evaluator_type``.

    The things and stuff of a PanopticFPN are evaluated separately. The classes of the model are matched to the classes
    of the dataset by name.

    Raises:
        ConfigError: if the dataset has another type, ``DATASETS.CHECK`` rejects its annotations, ``TEST.COCO_API`` is
            not installed, or :func:`~projects_vil.data.class_order` raises.
    """
    evaluator_type, evaluators = MetadataCatalog.get(dataset_name).get("evaluator_type"), []
    is_coco = evaluator_type in ("coco", "coco_panoptic_seg")
    if is_coco:
        evaluators.append(
            coco_evaluator(
                dataset_name,
                output_dir=output_folder,
                max_dets_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
                masks=cfg.MODEL.MASK_ON,
                check=cfg.DATASETS.CHECK,
                api=cfg.TEST.COCO_API,
            )
        )
    elif evaluator_type == "lvis":
        evaluators.append(FiniteLVISEvaluator(dataset_name, output_dir=output_folder))
    elif evaluator_type == "pascal_voc":
        evaluators.append(FiniteVOCEvaluator(dataset_name))
    if evaluator_type == "sem_seg" or (is_coco and is_panoptic(cfg)):
        read = label_reader(dataset_name)
        evaluators.append(SemSegEvaluator(dataset_name, output_dir=output_folder, sem_seg_loading_fn=read))
    if not evaluators:
        raise ConfigError(f"{dataset_name} is of type {evaluator_type!r}. Use coco, lvis, pascal_voc or sem_seg.")
    evaluator = evaluators[0] if len(evaluators) == 1 else DatasetEvaluators(evaluators)
    return match_to_dataset(evaluator, class_order(cfg, dataset_name))


class _InDatasetClasses(DatasetEvaluator):
    """Map the class indices of the model to the classes of a dataset, and drop detections of other classes.

    Args:
        evaluator: an evaluator for the classes of the dataset.
        order: the model's index of each class of the dataset.
    """

    def __init__(self, evaluator: DatasetEvaluator, order: Sequence[int]) -> None:
        self.evaluator, self.order = evaluator, torch.tensor(order)

    def reset(self) -> None:
        self.evaluator.reset()

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        matched = []
        for output in outputs:
            if "instances" in output:
                instances = output["instances"].to("cpu")
                rows, indices = (instances.pred_classes[:, None] == self.order).nonzero(as_tuple=True)
                instances = instances[rows]
                instances.pred_classes = indices
                output = output | {"instances": instances}
            matched.append(output)
        self.evaluator.process(inputs, matched)

    def evaluate(self) -> dict[str, Any]:
        return self.evaluator.evaluate()


def match_to_dataset(evaluator: DatasetEvaluator, order: Sequence[int] | None) -> DatasetEvaluator:
    """Return an evaluator for detections with the class indices of the model.

    Args:
        evaluator: an evaluator for the class indices of its dataset.
        order: the result of :func:`~projects_vil.data.class_order`.
    """
    return evaluator if order is None else _InDatasetClasses(evaluator, order)


def coco_evaluator(
    dataset_name: str,
    *,
    output_dir: str,
    max_dets_per_image: int = 100,
    masks: bool = False,
    check: str = "error",
    api: str = "pycocotools",
) -> coco_evaluation.COCOEvaluator:
    """Build the evaluator of a COCO dataset. It reads the annotations as training does.

    If an image has more objects than ``max_dets_per_image``, a warning gives the largest possible recall.

    Args:
        dataset_name: a name in detectron2's catalog.
        output_dir: the folder for ``coco_instances_results.json``.
        max_dets_per_image: maximum number of detections per image and class.
        masks: whether the detector has masks.
        check: the value of ``DATASETS.CHECK``.
        api: the value of ``TEST.COCO_API``.

    Raises:
        ConfigError: if the check rejects the annotations, or if the API is not installed.
    """
    check_coco_api(api)
    evaluator_class = FasterCOCOEvaluator if api == "faster_coco_eval" else MatchingCOCOEvaluator
    truth = ground_truth(dataset_name, check=check, masks=masks)
    evaluator = evaluator_class(dataset_name, truth, output_dir=output_dir, max_dets_per_image=max_dets_per_image)
    objects = evaluator._coco_api.dataset.get("annotations", ())
    numbers = Counter(one["image_id"] for one in objects if not one.get("iscrowd")).values()
    if (most := max(numbers, default=0)) > max_dets_per_image:
        share = sum(min(number, max_dets_per_image) for number in numbers) / sum(numbers)
        key, now = "TEST.DETECTIONS_PER_IMAGE", f"{dataset_name} has up to {most} objects in an image"
        text = f"{now}, but {key} is {max_dets_per_image}, so recall can be at most {100 * share:.1f}%. "
        text += f"To raise AP and AR, set {key} {most}."
        log_first_n(logging.WARNING, text, name=__name__, key="message")
    return evaluator


def check_coco_api(name: str) -> None:
    """Raise a :class:`ConfigError` unless ``TEST.COCO_API`` is one of ``COCO_APIS`` and installed."""
    check_choice("TEST.COCO_API", name, COCO_APIS)
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"TEST.COCO_API {name} is not installed. Run \"pip install 'vil-detectron2[eval]'\".")


class _Finite:
    """Raise a :class:`ConfigError` if an evaluator receives detections with non-finite values."""

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for record, output in zip(inputs, outputs, strict=True):
            if (instances := output.get("instances")) is not None:
                source = record.get("file_name", record.get("image_id"))
                check_finite(instances.pred_boxes.tensor.cpu(), instances.scores.cpu(), source=str(source))
        super().process(inputs, outputs)


class FiniteLVISEvaluator(_Finite, LVISEvaluator):
    """detectron2's LVIS evaluator, with a check for non-finite values."""


class FiniteVOCEvaluator(_Finite, PascalVOCDetectionEvaluator):
    """detectron2's Pascal VOC evaluator, with a check for non-finite values."""


class COCOEvaluator(_Finite, coco_evaluation.COCOEvaluator):
    """detectron2's COCO evaluator, also for annotations that are already read and checked.

    Args:
        dataset_name: a name in detectron2's catalog.
        truth: the annotations; by default the annotation file of the dataset.
        output_dir: the folder for ``coco_instances_results.json``.
        max_dets_per_image: maximum number of detections per image and class.
    """

    def __init__(self, dataset_name: str, truth: COCO | None, *, output_dir: str, max_dets_per_image: int) -> None:
        if truth is None:
            super().__init__(dataset_name, output_dir=output_dir, max_dets_per_image=max_dets_per_image)
            return
        # detectron2's constructor always reads the annotation file, which may have errors that ``truth`` has not.
        self._logger = logging.getLogger(coco_evaluation.__name__)
        self._distributed, self._output_dir, self._use_fast_impl = True, output_dir, False
        self._max_dets_per_image, self._tasks = [1, 10, max_dets_per_image], None
        self._cpu_device = torch.device("cpu")
        self._metadata, self._coco_api = MetadataCatalog.get(dataset_name), truth
        self._do_evaluation, self._kpt_oks_sigmas = "annotations" in truth.dataset, ()


class FasterCOCOEvaluator(COCOEvaluator):
    """Evaluate with faster-coco-eval, a C++ implementation with the same metrics of boxes and masks as pycocotools."""

    def _eval_predictions(self, predictions: list[dict[str, Any]], img_ids: list[int] | None = None) -> None:
        # An optional dependency.
        from faster_coco_eval import COCO, COCOeval_faster

        # detectron2's method has no argument for another COCOeval.
        results = [one for image in predictions for one in image["instances"]]
        ids = {index: number for number, index in self._metadata.get("thing_dataset_id_to_contiguous_id", {}).items()}
        for result in results if ids else ():
            result["category_id"] = ids[result["category_id"]]
        if self._output_dir:
            with atomic_write(Path(self._output_dir) / RESULTS_FILE) as partial:
                partial.write_text(json.dumps(results))
        if not self._do_evaluation:
            self._logger.info("Annotations are not available for evaluation.")
            return
        # Image ids may be text, which faster-coco-eval does not support.
        content, image_of = self._coco_api.dataset, _positions(self._coco_api.imgs)
        truth = COCO()
        truth.dataset = content | {"images": [one | {"id": image_of[one["id"]]} for one in content["images"]]}
        truth.dataset["annotations"] = [
            one | {"id": index, "image_id": image_of[one["image_id"]]}
            for index, one in enumerate(content.get("annotations", ()), start=1)
            if one["image_id"] in image_of
        ]
        truth.createIndex()
        results = [one | {"image_id": image_of[one["image_id"]]} for one in results]
        for task in sorted(self._tasks or self._tasks_from_predictions(results)):
            evaluation = None
            if results:
                # As in detectron2, the area of a mask is its number of pixels, not the area of its box.
                own = [{key: value for key, value in one.items() if (task, key) != ("segm", "bbox")} for one in results]
                evaluation = COCOeval_faster(truth, truth.loadRes(own), task)
                if img_ids is not None:
                    evaluation.params.imgIds = [image_of[image] for image in img_ids]
                if task != "keypoints":
                    evaluation.params.maxDets = self._max_dets_per_image
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
            names = self._metadata.get("thing_classes")
            self._results[task] = self._derive_coco_results(evaluation, task, class_names=names)


class MatchingCOCOEvaluator(COCOEvaluator):
    """detectron2's COCO evaluator with identical metrics and a small memory footprint.

    Each process matches every image with pycocotools as soon as it is processed, and keeps about 40 bytes per
    detection. The main process gathers these, and in small chunks the entries of ``coco_instances_results.json``. An
    image that was already processed, in the same or in another process, is ignored. Proposals are evaluated by
    detectron2.
    """

    def reset(self) -> None:
        super().reset()
        # Image -> task -> matches. Images are numbered in the order of their ids.
        self._images: dict[int, dict[str, Matches]] = {}
        if self._output_dir:
            os.makedirs(self._output_dir, exist_ok=True)
            # One line per image, in an unnamed file that is deleted when the process ends.
            self._results_file = tempfile.TemporaryFile("w+", dir=self._output_dir)

    @functools.cached_property
    def _truth(self) -> list[bytes]:
        """The images and their annotations as JSON text, which needs less memory than objects.

        Ids in the file may be text or large integers. They are replaced by positions, in the order of pycocotools.
        """
        coco, self._coco_api = self._coco_api, None
        self._image_of, self._category_of = _positions(coco.imgs), _positions(coco.cats)

        def entry(number: Any) -> list[Any]:
            ids = {"image_id": self._image_of[number]}
            objects = [
                one | ids | {"id": index, "category_id": self._category_of.get(one["category_id"], -1)}
                for index, one in enumerate(coco.imgToAnns.get(number, []), start=1)
            ]
            return [coco.imgs[number] | {"id": ids["image_id"]}, objects]

        return [json.dumps(entry(number)).encode() for number in self._image_of]

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
        truth = self._truth
        image = self._image_of[image_id]
        if image not in self._images:
            tasks = self._tasks_from_predictions(results) if results and self._do_evaluation else ()
            ids = {"image_id": image}
            own = [one | ids | {"category_id": self._category_of[one["category_id"]]} for one in results]
            self._images[image] = {task: self._match(truth[image], own, task) for task in tasks}
            if self._output_dir:
                self._results_file.write(json.dumps(results)[1:-1] + "\n")

    def _match(self, truth: bytes, results: list[dict[str, Any]], task: str) -> Matches:
        return match_image(*json.loads(truth), results, task, self._max_dets_per_image)

    def evaluate(self) -> dict[str, Any]:
        if any(comm.all_gather(bool(self._predictions))):
            return super().evaluate()
        repeated = set().union(*comm.all_gather(np.array(list(self._images), int))[: comm.get_rank()])
        if self._output_dir:
            self._write_results(repeated)
        if not self._do_evaluation:
            self._logger.info("Annotations are not available for evaluation.")
            return {}
        own = [tasks for number, tasks in self._images.items() if number not in repeated]
        results, classes = {}, self._metadata.get("thing_classes")
        for task in sorted(set().union(*comm.all_gather(set().union(*own)))) or ["bbox"]:
            parts = comm.gather(_joined([tasks.pop(task) for tasks in own if task in tasks]))
            if comm.is_main_process():
                parts, evaluation = list(filter(None, parts)), None
                if parts:
                    # Objects in images without detections count too.
                    seen = {image for found, _ in parts for image in np.unique(found["image"])}
                    rest = [truth for image, truth in enumerate(self._truth) if image not in seen]
                    parts += [_joined([self._match(truth, [], task) for truth in rest])] * bool(rest)
                    categories = list(self._category_of.values())
                    evaluation = summarize(parts, task, categories, self._max_dets_per_image)
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


def _positions(ids: Iterable[Any]) -> dict[Any, int]:
    """Return the position of each id in sorted order."""
    return {number: position for position, number in enumerate(sorted(ids))}


def _joined(tables: list[Matches]) -> Matches | tuple[()]:
    return tuple(map(np.concatenate, zip(*tables, strict=True)))


# Metric names --------------------------------------------------------------------------------------------------------


def check_metric(cfg: CfgNode) -> None:
    """Raise a :class:`ConfigError` unless the evaluators compute ``TEST.BEST_METRIC``.

    Args:
        cfg: a config whose ``DATASETS.TEST`` are registered. The metric is ``task/name`` or ``dataset/task/name``.
    """
    metric, tests = cfg.TEST.BEST_METRIC, cfg.DATASETS.TEST
    dataset, task, name = split_metric_name(cfg)
    tasks = _tasks(cfg)
    if task not in tasks:
        prefix = "DATASET/" if len(tests) > 1 else ""
        raise ConfigError(
            f"TEST.BEST_METRIC is '{metric}'. Write {prefix}TASK/METRIC as in metrics.json. TASK must be "
            f"{' or '.join(tasks)}."
        )
    if task == LOSS_TASK and not cfg.TEST.VALIDATION_LOSS:
        raise ConfigError(f"TEST.BEST_METRIC '{metric}' needs the validation loss. Set TEST.VALIDATION_LOSS True.")
    if task == LOSS_TASK:
        if name != TOTAL_LOSS and not name.startswith("loss_"):
            raise ConfigError(
                f"TEST.BEST_METRIC is {metric}. Use {LOSS_TASK}/{TOTAL_LOSS} or a name {LOSS_TASK}/loss_*."
            )
        return
    metrics, per_class = metric_names(cfg, dataset, task)
    if metrics and name not in (*metrics, *per_class):
        also = f", and per class as {per_class[0]}" if per_class else ""
        near = closest(name, (*metrics, *per_class), most=3)
        raise ConfigError(f"TEST.BEST_METRIC is {metric}. Use one of {', '.join(metrics)}{also}{near or '.'}")


def _tasks(cfg: CfgNode) -> list[str]:
    """Return the tasks that an evaluation of this model reports."""
    if is_segmentor(cfg):
        return ["sem_seg", LOSS_TASK]
    has_rois = cfg.MODEL.META_ARCHITECTURE in ("GeneralizedRCNN", "PanopticFPN")
    is_evaluated = {
        "segm": has_rois and cfg.MODEL.MASK_ON,
        "keypoints": has_rois and cfg.MODEL.KEYPOINT_ON,
        "sem_seg": is_panoptic(cfg),
    }
    return ["bbox", *(task for task, evaluated in is_evaluated.items() if evaluated), LOSS_TASK]


def split_metric_name(cfg: CfgNode) -> tuple[str, str, str]:
    """Split ``TEST.BEST_METRIC`` into dataset, task and name. Names of datasets and classes may contain a ``/``.

    If ``DATASETS.TEST`` has several datasets, the metric may start with one of them. The default is the first dataset.
    Missing parts are empty.
    """
    metric, dataset = cfg.TEST.BEST_METRIC, "".join(cfg.DATASETS.TEST[:1])
    if len(cfg.DATASETS.TEST) > 1:
        dataset = next((name for name in cfg.DATASETS.TEST if metric.startswith(f"{name}/")), dataset)
        metric = metric.removeprefix(f"{dataset}/")
    task, _, name = metric.partition("/")
    return dataset, task, name


def metric_names(cfg: CfgNode, dataset: str, task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the metrics of a task on a registered dataset, and the metrics per class."""
    metadata = MetadataCatalog.get(dataset)
    if task == "sem_seg":
        stuff = metadata.get("stuff_classes", ())
        class_metrics = ("IoU", "ACC", "BoundaryIoU", "min(IoU, B-Iou)")
        return _LABEL_METRICS, tuple(f"{metric}-{name}" for metric in class_metrics for name in stuff)
    evaluator_type = metadata.get("evaluator_type")
    metrics = _DETECTION_METRICS.get(evaluator_type, ())
    metrics = tuple(name for name in metrics if (task, name) != ("keypoints", "APs"))
    things = class_names(cfg, dataset) or () if evaluator_type in ("coco", "coco_panoptic_seg") else ()
    # A single class has no separate metrics.
    return metrics, tuple(f"AP-{name}" for name in things) if len(things) > 1 else ()
