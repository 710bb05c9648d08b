"""Faster and Mask R-CNN in fixed steps on plain tensors."""

import math

import torch
from detectron2.modeling.poolers import ROIPooler
from torch import Tensor, nn
from torchvision.ops import roi_align

from projects_vil.export.exportable.boxes import clip, decode, grid_anchors, has_area, per_anchor
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.exportable.nms import best_of_row, best_without_overlap, check_writable, divided


class ExportableRCNN(ExportableDetector):
    """detectron2's Faster or Mask R-CNN: see :class:`ExportableDetector`."""

    @property
    def has_masks(self) -> bool:
        return self.detector.roi_heads.mask_on

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        heads = self.detector.roi_heads
        proposals, image = self._proposals(features, size)
        maps = [features[name] for name in heads.box_in_features]
        scores, boxes = self._judged(maps, proposals, image, size)
        boxes, scores, classes, image = self._best(scores, boxes, image, features)
        outputs = {"boxes": boxes, "scores": scores, "classes": classes, "image_index": image}
        if self.has_masks:
            maps = [features[name] for name in heads.mask_in_features]
            logits = heads.mask_head.layers(pool(heads.mask_pooler, maps, boxes, image)).float()
            outputs["masks"] = of_class(logits, classes).sigmoid()
        return outputs

    def _proposals(self, features: dict[str, Tensor], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Boxes that may hold an object, (P, 4), and their images, (P,)."""
        rpn = self.detector.proposal_generator
        maps = [features[name] for name in rpn.in_features]
        logits, deltas = rpn.rpn_head(maps)
        scores, boxes = [], []
        for level, anchors in enumerate(grid_anchors(rpn.anchor_generator, maps)):
            level_scores = per_anchor(logits[level], 1).float().flatten(1)
            best, place = best_of_row(level_scores, rpn.pre_nms_topk[False], filler=-math.inf)
            chosen = per_anchor(deltas[level], 4).gather(1, place[..., None].expand(-1, -1, 4))
            boxes.append(decode(rpn.box2box_transform, chosen, anchors[place]))
            scores.append(best)
        # (B, L * topk, ...)
        scores, boxes = torch.cat(scores, 1), clip(torch.cat(boxes, 1), size)
        image, candidate = (scores.isfinite() & has_area(boxes, rpn.min_box_size)).nonzero().unbind(1)
        scores, boxes = scores[image, candidate], boxes[image, candidate]
        kept = best_without_overlap(
            boxes,
            scores,
            group=image * len(maps) + divided(candidate, rpn.pre_nms_topk[False]),
            groups_per_image=len(maps),
            **self._images(image, features),
            threshold=rpn.nms_thresh,
            number=rpn.post_nms_topk[False],
        )
        return boxes[kept], image[kept]

    @property
    def _predictor(self) -> nn.Module:
        """Whose thresholds count."""
        return self.detector.roi_heads.box_predictor

    def _judged(
        self, maps: list[Tensor], proposals: Tensor, image: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Of the proposals (P, 4), the scores of classes and background (P, K + 1), and boxes (P, K or 1, 4)."""
        heads = self.detector.roi_heads
        logits, deltas = heads.box_predictor(heads.box_head(pool(heads.box_pooler, maps, proposals, image)))
        boxes = decode(heads.box_predictor.box2box_transform, deltas.unflatten(1, (-1, 4)), proposals[:, None])
        return probabilities(heads.box_predictor, logits), clip(boxes, size)

    def _best(
        self, scores: Tensor, boxes: Tensor, image: Tensor, features: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Boxes (D, 4), scores (D,), classes (D,) and images (D,) of the detections."""
        num_groups = scores.shape[1]
        check_writable(scores)
        is_finite = boxes.isfinite().flatten(1).all(1) & scores.isfinite().all(1)
        # Without the background, which is last.
        is_above = scores[:, :-1] > self._predictor.test_score_thresh
        row, classes = (is_above & is_finite[:, None]).nonzero().unbind(1)
        boxes = boxes[row, classes if boxes.shape[1] > 1 else torch.zeros_like(classes)]
        scores, image = scores[row, classes], image[row]
        kept = best_without_overlap(
            boxes,
            scores,
            group=image * num_groups + classes,
            groups_per_image=num_groups,
            **self._images(image, features),
            threshold=self._predictor.test_nms_thresh,
            number=self._predictor.test_topk_per_image,
        )
        boxes, scores, classes, image = boxes[kept], scores[kept], classes[kept], image[kept]
        kept = has_area(boxes).nonzero()[:, 0]
        return boxes[kept], scores[kept], classes[kept], image[kept]


def probabilities(predictor: nn.Module, logits: Tensor) -> Tensor:
    """(P, K + 1) -> the same, in float32."""
    logits = logits.float()
    return logits.sigmoid() if predictor.use_sigmoid_ce else logits.softmax(dim=1)


def pool(pooler: ROIPooler, maps: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
    """RoIAlign of the boxes (P, 4) of images (P,), each from the map that fits its size: (P, C, S, S).

    Source: FPN (Lin et al. 2017), equation 1, as detectron2's ``ROIPooler``. Sampled in float32.
    """
    first, last = pooler.min_level, pooler.max_level
    size = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    level = torch.floor(pooler.canonical_level + torch.log2(size / pooler.canonical_box_size + 1e-8))
    level = level.clamp(min=first, max=last).long() - first
    regions = torch.cat([image[:, None].to(boxes.dtype), boxes], dim=1)
    pooled = maps[0].new_zeros(boxes.shape[0], maps[0].shape[1], *pooler.output_size)
    for index, (features, layer) in enumerate(zip(maps, pooler.level_poolers, strict=True)):
        rows = (level == index).nonzero()[:, 0]
        values = roi_align(
            features.float(), regions[rows], layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        )
        pooled = pooled.index_copy(0, rows, values.to(pooled.dtype))
    return pooled


def of_class(masks: Tensor, classes: Tensor) -> Tensor:
    """The mask of each detection's class: (D, K or 1, S, S), (D,) -> (D, 1, S, S)."""
    if masks.shape[1] == 1:
        return masks
    index = classes[:, None, None, None].expand(-1, 1, masks.shape[2], masks.shape[3])
    return masks.gather(1, index)
