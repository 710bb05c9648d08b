"""Helpers for the tests of inference: synthetic images, a runner without weights, and a reader of results."""

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.structures import Boxes, Instances
from PIL import Image

from projects_vil.checkpoint import Checkpointer
from projects_vil.config import CONFIG_FILE
from projects_vil.data import Categories, size_for_testing
from projects_vil.inference import Detector, predict
from tests.projects_vil.helpers import assert_same_detections, small_config, untrained_detector

ANY = Categories((3, 7), ("left", "right"))
config = functools.cache(small_config)


class HalfRunner:
    """A runner that detects the brighter half of each image. The score is its brightness."""

    channels, sides, score_threshold, weights = "RGB", (1, None), 0.0, __file__
    categories = ANY

    def __init__(self) -> None:
        self.batches = []

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        return size_for_testing(config(), height, width)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        return tuple(-(-side // 32) * 32 for side in self.input_size(height, width))

    def __call__(self, images, sizes):
        assert len({self.padded_size(*size) for size in sizes}) == 1
        assert all(image.dtype == torch.uint8 for image in images)
        self.batches.append([image.shape[1:] for image in images])
        return [self._find(image, size) for image, size in zip(images, sizes, strict=True)]

    def _find(self, image, size) -> Instances:
        halves = image.float().chunk(2, dim=2)
        brighter = int(halves[1].mean() > halves[0].mean())
        left, right = (size[1] / 2, size[1]) if brighter else (0, size[1] / 2)
        found = Instances(size, pred_boxes=Boxes([[left, 0, right, size[0]]]))
        found.scores = halves[brighter].mean()[None] / 255
        found.pred_classes = torch.tensor([brighter])
        return found


def picture(height: int, width: int, *, bright: str = "left") -> np.ndarray:
    pixels = np.zeros((height, width, 3), np.uint8)
    half = slice(0, width // 2) if bright == "left" else slice(width // 2, None)
    pixels[:, half] = 200, 100, 0
    return pixels


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def read(folder: Path) -> tuple[list[dict], dict]:
    return json.loads((folder / "results.json").read_text()), json.loads((folder / "images.json").read_text())


def save_run(folder: Path, name: str, *overrides: str):
    """Write the config and the weights of an untrained detector like a run, and return the config and the model."""
    cfg = small_config(name, "OUTPUT_DIR", str(folder), *overrides)
    detector = untrained_detector(cfg)
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(cfg.dump())
    Checkpointer(detector, str(folder), cfg=cfg).save("model_final")
    return cfg, detector


def run_on(source: Path, output: Path, *, runner=None, drawings: bool = False, **options):
    return predict(Detector(runner or HalfRunner()), source, output, drawings=drawings, **options)


def instances_by_image(results: Iterable[dict]) -> dict[int | str, Instances]:
    """Convert COCO results."""
    grouped = defaultdict(list)
    for result in results:
        grouped[result["image_id"]].append(result)
    instances = {}
    for image_id, items in grouped.items():
        boxes = torch.tensor([item["bbox"] for item in items])
        boxes[:, 2:] += boxes[:, :2]
        found = instances[image_id] = Instances((0, 0), pred_boxes=Boxes(boxes))
        found.scores = torch.tensor([item["score"] for item in items])
        found.pred_classes = torch.tensor([item["category_id"] for item in items])
        if "segmentation" in items[0]:
            masks = mask_util.decode([item["segmentation"] for item in items])
            found.pred_masks = torch.from_numpy(masks).permute(2, 0, 1)
    return instances


def results_of(rows: Iterable[dict]) -> Iterator[dict]:
    """Convert rows of Parquet files to COCO results, with file names as the ids of images."""
    for row in rows:
        for index, (left, top, right, bottom) in enumerate(row["boxes"] or ()):
            result = {"image_id": row["file_name"], "bbox": [left, top, right - left, bottom - top]}
            result |= {"category_id": row["category_ids"][index], "score": row["scores"][index]}
            if row["masks"] is not None:
                result["segmentation"] = {"size": [row["height"], row["width"]], "counts": row["masks"][index]}
            yield result


def assert_same(ours: Iterable[dict], theirs: Iterable[dict]) -> None:
    """Check that COCO results are equal up to rounding."""
    found, expected = instances_by_image(ours), instances_by_image(theirs)
    assert found.keys() == expected.keys() and expected
    for image_id, instances in expected.items():
        assert_same_detections(found[image_id], instances)
