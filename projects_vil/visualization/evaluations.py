"""Drawings of the same few images at each evaluation of a run."""

import logging
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from backbones.utils.errors import InputError
from projects_vil.visualization.results import draw_results, predictions_file

DRAWINGS_FOLDER = "drawings"
SCORE_THRESHOLD = 0.3  # a detector that has begun to learn is not sure of much


def draw_evaluation(cfg: CfgNode, *, name: str) -> list[Path]:
    """Draw ``TEST.DRAW_IMAGES`` images of each test set, predictions beside the ground truth.

    They are spread evenly over the dataset, and are the same each time. What cannot be drawn is a warning, since no
    run should end for want of a drawing.

    Args:
        name: of the evaluation: ``OUTPUT_DIR/drawings/DATASET_NAME.jpg``.

    Returns:
        The files.
    """
    output, paths = Path(cfg.OUTPUT_DIR), []
    for dataset in cfg.DATASETS.TEST if cfg.TEST.DRAW_IMAGES else ():
        if MetadataCatalog.get(dataset).get("evaluator_type") not in ("coco", "coco_panoptic_seg", "sem_seg"):
            continue
        path = output / DRAWINGS_FOLDER / f"{dataset}_{name}.jpg"
        try:
            draw_results(
                dataset,
                predictions_file(output, dataset),
                path,
                num_images=cfg.TEST.DRAW_IMAGES,
                score_threshold=SCORE_THRESHOLD,
            )
        except InputError as error:
            logging.getLogger(__name__).warning("no drawing of %s: %s", dataset, error)
        else:
            paths.append(path)
    return paths
