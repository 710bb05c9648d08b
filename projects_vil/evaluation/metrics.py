"""The names of metrics, known before the first evaluation."""

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from backbones import InputError
from backbones.utils.errors import closest
from projects_vil.data import class_names
from projects_vil.evaluation.losses import LOSS_TASK, TOTAL_LOSS

_COCO = ("AP", "AP50", "AP75", "APs", "APm", "APl")
# Of boxes, masks and keypoints, by the dataset's evaluator_type, as detectron2's evaluators name them.
_WITH_AP = {
    "coco": _COCO,
    "coco_panoptic_seg": _COCO,
    "lvis": (*_COCO, "APr", "APc", "APf"),
    "pascal_voc": ("AP", "AP50", "AP75"),
}
_BY_CLASS = ("coco", "coco_panoptic_seg")
_OF_LABELS = ("mIoU", "fwIoU", "mACC", "pACC")
_OF_A_LABEL = ("IoU", "ACC")
# Where OpenCV computes boundaries, which this project asks for, and the labels and the ignored one fit into a byte.
_OF_BOUNDARIES, _LARGEST_NUMBER = ("BoundaryIoU", "min(IoU, B-Iou)"), 254


def check_metric(cfg: CfgNode) -> None:
    """Whether the evaluator of its task can give ``TEST.BEST_METRIC``, the best of which is kept.

    Args:
        cfg: its ``DATASETS.TEST`` are registered; its metric is ``task/name``, or ``dataset/task/name``.

    Raises:
        InputError: for a name that the evaluator does not have.
    """
    metric = cfg.TEST.BEST_METRIC
    dataset, task, name = parts_of_metric(cfg)
    if task == LOSS_TASK:
        if name != TOTAL_LOSS and not name.startswith("loss_"):
            raise InputError(f"TEST.BEST_METRIC is {metric}: it is {LOSS_TASK}/{TOTAL_LOSS}, or one of the loss_...")
        return
    of_all, of_classes = metric_names(cfg, dataset, task)
    if of_all and name not in (*of_all, *of_classes):
        also = f", and for each class as {of_classes[0]}" if of_classes else ""
        near = closest(name, (*of_all, *of_classes), most=3)
        raise InputError(f"TEST.BEST_METRIC is {metric}: the metrics of {task} are {', '.join(of_all)}{also}{near}")


def parts_of_metric(cfg: CfgNode) -> tuple[str, str, str]:
    """The dataset of ``TEST.BEST_METRIC``, its task and its name; datasets and classes may have a ``/`` of their own.

    It has a dataset where there are several, and else is of the only one. What it lacks is empty.
    """
    metric, dataset = cfg.TEST.BEST_METRIC, "".join(cfg.DATASETS.TEST[:1])
    if len(cfg.DATASETS.TEST) > 1:
        dataset = next((name for name in cfg.DATASETS.TEST if metric.startswith(f"{name}/")), "")
        metric = metric.removeprefix(f"{dataset}/")
    task, _, name = metric.partition("/")
    return dataset, task, name


def metric_names(cfg: CfgNode, dataset: str, task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What an evaluator gives for a task of a registered dataset, and for its single classes.

    Both are empty where nobody evaluates such datasets.
    """
    metadata = MetadataCatalog.get(dataset)
    if task == "sem_seg":
        stuff = metadata.get("stuff_classes", ())
        of_a_label = _OF_A_LABEL + (_OF_BOUNDARIES if len(stuff) <= _LARGEST_NUMBER else ())
        return _OF_LABELS, tuple(f"{metric}-{name}" for metric in of_a_label for name in stuff)
    kind = metadata.get("evaluator_type")
    of_all = tuple(name for name in _WITH_AP.get(kind, ()) if (task, name) != ("keypoints", "APs"))
    things = class_names(cfg, dataset) or () if kind in _BY_CLASS else ()
    # One class has no figures of its own.
    return of_all, tuple(f"AP-{name}" for name in things) if len(things) > 1 else ()
