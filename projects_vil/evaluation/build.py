"""Which of detectron2's evaluators judges a dataset."""

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)

from backbones import InputError
from projects_vil.config import is_panoptic
from projects_vil.data import evaluated_as, label_reader
from projects_vil.evaluation.coco import FasterCOCOEvaluator, check_coco_api


def build_evaluator(cfg: CfgNode, dataset_name: str, output_folder: str) -> DatasetEvaluator:
    """The evaluator of the dataset's ``evaluator_type``: COCO, LVIS, Pascal VOC or semantic segmentation.

    Of a PanopticFPN both the things and the stuff are judged, each by itself.

    Raises:
        InputError: for a dataset of another type, annotations that ``DATASETS.CHECK`` refuses, or a ``TEST.COCO_API``
            that is not there.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    if kind in ("coco", "coco_panoptic_seg"):
        things = coco_evaluator(
            dataset_name,
            output_dir=output_folder,
            max_dets_per_image=cfg.TEST.DETECTIONS_PER_IMAGE,
            masks=cfg.MODEL.MASK_ON,
            check=cfg.DATASETS.CHECK,
            api=cfg.TEST.COCO_API,
        )
        return (
            DatasetEvaluators([things, _label_evaluator(dataset_name, output_folder)]) if is_panoptic(cfg) else things
        )
    if kind == "lvis":
        return LVISEvaluator(dataset_name, output_dir=output_folder)
    if kind == "pascal_voc":
        return PascalVOCDetectionEvaluator(dataset_name)
    if kind == "sem_seg":
        return _label_evaluator(dataset_name, output_folder)
    raise InputError(
        f"the dataset {dataset_name} has the evaluator type {kind!r}: it is coco, lvis, pascal_voc or sem_seg"
    )


def _label_evaluator(dataset_name: str, output_folder: str) -> SemSegEvaluator:
    return SemSegEvaluator(dataset_name, output_dir=output_folder, sem_seg_loading_fn=label_reader(dataset_name))


def coco_evaluator(
    dataset_name: str,
    *,
    output_dir: str,
    max_dets_per_image: int = 100,
    masks: bool = False,
    check: str = "error",
    api: str = "pycocotools",
) -> COCOEvaluator:
    """detectron2's evaluator of a COCO file, on the annotations as training reads them.

    Args:
        masks: whether the detector has masks.
        check: as ``DATASETS.CHECK``.
        api: as ``TEST.COCO_API``.

    Raises:
        InputError: for annotations that the check refuses, or an API that is not installed.
    """
    check_coco_api(api)
    evaluator = FasterCOCOEvaluator if api == "faster_coco_eval" else COCOEvaluator
    with evaluated_as(dataset_name, check=check, masks=masks) as name:
        return evaluator(name, output_dir=output_dir, max_dets_per_image=max_dets_per_image)
