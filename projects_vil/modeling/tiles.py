"""Detection in tiles of large images: ``TEST.TILE_SIZE``."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import batched_nms
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from backbones import ConfigError
from projects_vil.config import DETECTOR_ARCHITECTURES, head_of

# Boxes that end at most this fraction of a tile before its edge may be cut by the edge.
_MARGIN = 1 / 64


class TiledDetector(nn.Module):
    """Detect objects in overlapping tiles of each image, and merge the detections. Inputs and outputs are detectron2's.

    The image is also divided at half of its resolution, at a quarter, and so on, until it fits into one tile. A box
    that ends near an edge between two tiles may be cut, so it is dropped. An object that is smaller than the overlap is
    complete in at least one tile of the full resolution, and a larger object in a tile of a lower resolution.
    Detections of an object in several tiles are merged by class-wise non-maximum suppression.

    Args:
        cfg: Config of the detector. It has the side of a tile in pixels (``TEST.TILE_SIZE``) and the overlap of
            neighboring tiles as a fraction of the side (``TEST.TILE_OVERLAP``).
        model: A GeneralizedRCNN or RetinaNet in eval mode.

    Raises:
        ConfigError: If the model is another one or detects keypoints, or if the overlap is not in [0, 0.9].
    """

    def __init__(self, cfg: CfgNode, model: nn.Module) -> None:
        super().__init__()
        if cfg.MODEL.META_ARCHITECTURE not in DETECTOR_ARCHITECTURES or cfg.MODEL.KEYPOINT_ON:
            raise ConfigError("TEST.TILE_SIZE supports a RetinaNet or GeneralizedRCNN without keypoints. Set it to 0.")
        if not 0 <= cfg.TEST.TILE_OVERLAP <= 0.9:
            raise ConfigError(f"TEST.TILE_OVERLAP is {cfg.TEST.TILE_OVERLAP}. It must be from 0 to 0.9.")
        self.model, self.side, self.overlap = model, cfg.TEST.TILE_SIZE, cfg.TEST.TILE_OVERLAP
        self.train(model.training)
        self.nms_threshold = cfg.MODEL[head_of(cfg)].NMS_THRESH_TEST
        self.num_detections = cfg.TEST.DETECTIONS_PER_IMAGE

    @torch.no_grad()
    def forward(self, batched_inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
        return [{"instances": self._detect(inputs["image"])} for inputs in batched_inputs]

    def _detect(self, image: Tensor) -> Instances:
        """Return the detections in an image (3, H, W), in its pixels."""
        height, width = image.shape[1:]
        last = max(0, math.ceil(math.log2(max(height, width) / self.side)))
        parts, corners = [], []
        for step in (2**level for level in range(last + 1)):
            tops, lefts = (self._starts(length, self.side * step) for length in (height, width))
            for top, left in itertools.product(tops, lefts):
                parts.append(self._detect_in_tile(image, top, left, step))
                corners += [(top, left)] * len(parts[-1])
        boxes, scores = (torch.cat([part.get(key) for part in parts]) for key in ("boxes", "scores"))
        classes = torch.cat([part.pred_classes for part in parts])
        kept = batched_nms(boxes, scores, classes, self.nms_threshold)[: self.num_detections]
        found = {"pred_boxes": Boxes(boxes[kept]), "scores": scores[kept], "pred_classes": classes[kept]}
        if parts[0].has("pred_masks"):
            # Only the kept masks get the size of the image.
            tile_masks = list(itertools.chain.from_iterable(part.pred_masks for part in parts))
            masks = torch.zeros(len(kept), height, width, dtype=torch.bool, device=scores.device)
            for mask, index in zip(masks, kept.tolist(), strict=True):
                (top, left), tile = corners[index], tile_masks[index]
                mask[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
            found["pred_masks"] = masks
        return Instances((height, width), **found)

    def _starts(self, length: int, side: int) -> list[int]:
        """Return the first pixels of tiles that cover a length with the overlap."""
        number = math.ceil(max(length - side, 0) / (side * (1 - self.overlap))) + 1
        return torch.linspace(0, max(length - side, 0), number).round().int().tolist()

    def _detect_in_tile(self, image: Tensor, top: int, left: int, step: int) -> Instances:
        """Return the detections in a tile at 1 / ``step`` of the resolution. ``boxes`` are in pixels of the image."""
        side = self.side * step
        tile = image[:, top : top + side, left : left + side]
        height, width = tile.shape[1:]
        inputs = {"image": tile, "height": height, "width": width}
        if step > 1:
            size = (math.ceil(height / step), math.ceil(width / step))
            inputs["image"] = F.interpolate(tile[None].float(), size, mode="bilinear", antialias=True)[0]
        instances = self.model([inputs])[0]["instances"]
        boxes = instances.pred_boxes.tensor
        # The distances to the edges of the tile, and whether another tile is behind each edge
        distances = torch.cat([boxes[:, :2], boxes.new_tensor([width, height]) - boxes[:, 2:]], dim=1)
        has_next = [left > 0, top > 0, left + width < image.shape[2], top + height < image.shape[1]]
        is_cut = ((distances < side * _MARGIN) & torch.tensor(has_next, device=boxes.device)).any(dim=1)
        instances.boxes = boxes + boxes.new_tensor([left, top, left, top])
        return instances[~is_cut]
