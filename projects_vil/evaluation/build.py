"""Which of detectron2's evaluators judges a dataset."""

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)

from backbones import InputError
from projects_vil.data import evaluated_as, label_reader


def build_evaluator(cfg: CfgNode, dataset_name: str, output_folder: str) -> DatasetEvaluator:
    """The evaluator of the dataset's ``evaluator_type``: COCO, LVIS, Pascal VOC or semantic segmentation.

    Raises:
        InputError: for a dataset of another type, or annotations that ``DATASETS.CHECK`` refuses.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    if kind == "coco":
        with evaluated_as(dataset_name, check=cfg.DATASETS.CHECK, masks=cfg.MODEL.MASK_ON) as name:
            return COCOEvaluator(name, output_dir=output_folder, max_dets_per_image=cfg.TEST.DETECTIONS_PER_IMAGE)
    if kind == "lvis":
        return LVISEvaluator(dataset_name, output_dir=output_folder)
    if kind == "pascal_voc":
        return PascalVOCDetectionEvaluator(dataset_name)
    if kind == "sem_seg":
        return SemSegEvaluator(dataset_name, output_dir=output_folder, sem_seg_loading_fn=label_reader(dataset_name))
    raise InputError(
        f"the dataset {dataset_name} has the evaluator type {kind!r}: it is coco, lvis, pascal_voc or sem_seg"
    )
