"""Training samples as a model gets them, after all augmentation."""

from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.structures import BitMasks, BoxMode, Instances, PolygonMasks

from backbones.utils.errors import InputError
from projects_vil.config import is_panoptic, is_segmentor
from projects_vil.data import build_train_loader
from projects_vil.utils import check_output_folder
from projects_vil.visualization.drawing import draw_instances, draw_labels, draw_masks, write_image
from projects_vil.visualization.panels import stack_rows

SMALLEST_DRAWN = 640  # pixels of the longer side, so that labels can be read


def draw_samples(cfg: CfgNode, output: str | Path, *, number: int = 16, seed: int | None = None) -> list[Path]:
    """Draw the first images that a run in one process trains on, a PNG each, with what is learned of them.

    Args:
        cfg: of the run; its datasets are registered.
        output: the folder; it is created. It has no drawings of another call, which could be taken for these.
        number: of images.
        seed: of the run; by default ``SEED``, or 0 where that is drawn anew for each run.

    Returns:
        the files, in the order of training.

    Raises:
        InputError: for a number or a seed out of range, what is wrong with the datasets, drawings that are there, or
            files that cannot be written.
    """
    if number < 1:
        raise InputError(f"--number {number}: it is 1 or more")
    seed = max(cfg.SEED, 0) if seed is None else seed
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed}: it is 0 or more, and below 2^63")
    check_output_folder(output)
    earlier = sorted(Path(output).glob("[0-9][0-9][0-9][0-9]*_*.png"))
    if earlier:
        raise InputError(
            f"--output {output} has drawings of an earlier call ({earlier[0].name}): choose another folder"
        )
    cfg = cfg.clone()
    cfg.defrost()
    # Their number changes nothing but how many images are mapped ahead.
    cfg.DATALOADER.NUM_WORKERS = 0
    loader = build_train_loader(cfg)
    loader.start(seed=seed, iteration=0)
    paths = []
    for place, sample in enumerate(islice(chain.from_iterable(loader), number)):
        path = Path(output) / f"{place:04d}_{Path(sample['file_name']).stem}.png"
        write_image(path, draw_sample(cfg, sample))
        paths.append(path)
    return paths


def draw_sample(cfg: CfgNode, sample: dict[str, Any]) -> np.ndarray:
    """One sample of a training loader, enlarged where it is small, below a line on it: (height, width, 3) uint8 RGB.

    Objects and labels of stuff, where both are learned, are two drawings, the second below the first.
    """
    channels = sample["image"].permute(1, 2, 0).numpy().round().astype(np.uint8)
    image = np.ascontiguousarray(channels[..., ::-1] if cfg.INPUT.FORMAT == "BGR" else channels)
    metadata = MetadataCatalog.get(cfg.DATASETS.TRAIN[0])
    height, width = image.shape[:2]
    scale = max(1, SMALLEST_DRAWN / max(height, width))
    rows = []
    if not is_segmentor(cfg):
        rows.append(_draw_objects(image, sample["instances"], metadata, scale=scale))
    if is_segmentor(cfg) or is_panoptic(cfg):
        rows.append(draw_labels(image, sample["sem_seg"].numpy(), metadata, scale=scale))
    return stack_rows(rows, title=sample_title(sample))


def sample_title(sample: dict[str, Any]) -> str:
    """The line above a drawn sample: its files, its size and, of a detector's, how many objects it has."""
    names = " + ".join(Path(sample[key]).name for key in ("file_name", "pasted_from") if key in sample)
    height, width = sample["image"].shape[1:]
    objects = f", objects: {len(sample['instances'])}" if "instances" in sample else ""
    return f"{names}, height {height}, width {width}{objects}"


def _draw_objects(image: np.ndarray, instances: Instances, metadata: Metadata, *, scale: float) -> np.ndarray:
    classes = instances.gt_classes.tolist()
    if instances.has("gt_masks"):
        image = draw_masks(image, _bitmaps(instances), classes, metadata)
    objects = [
        {"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": class_index}
        for box, class_index in zip(instances.gt_boxes.tensor.tolist(), classes, strict=True)
    ]
    return draw_instances(image, objects, metadata, scale=scale)


def _bitmaps(instances: Instances) -> np.ndarray:
    masks = instances.gt_masks
    if isinstance(masks, PolygonMasks):
        masks = BitMasks.from_polygon_masks(masks, *instances.image_size)
    return masks.tensor.numpy()
