"""Detectors that every exporter can trace, equal to detectron2's.

detectron2's inference branches on values, builds lists of ``Instances`` and loops over classes.
``detectron2.export.TracingAdapter`` makes it traceable, but ``torch.export`` rejects it. The detectors here compute the
same results from plain tensors and share the parameters of the original.

Shapes: B images, A anchors per position, K classes, N candidates, P proposals, D detections, S side of a mask.

- Lists of candidates are padded with scores that never pass, so that a trace does not fix their length.
- Non-maximum suppression of all groups (classes, levels, images) is one call. Each group is shifted to its own cell of
  a square grid. ``torchvision.ops.batched_nms`` shifts groups along a line: with 80 classes, coordinates reach 10^5
  pixels, where float32 rounds to 0.008 pixels. In a grid the rounding is ten times smaller.
- The best n detections of each image are selected by rank, not by a loop over images.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.modeling import GeneralizedRCNN, RetinaNet, StandardROIHeads
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import Tensor, nn
from torchvision.ops import nms

from backbones import ConfigError
from backbones.layers.block import pad_to_multiple
from projects_vil.modeling.sync_free import grid_anchors

_LOWEST = -1e30  # below every score


# -- anchors and boxes -----------------------------------------------------------------------------


def per_anchor(predictions: Tensor, channels: int) -> Tensor:
    """Reshape (B, A * channels, H, W) to (B, H * W * A, channels), in the order of :func:`grid_anchors`."""
    # Always copy, because whether a view is possible depends on the example's size.
    predictions = predictions.unflatten(1, (-1, channels)).permute(0, 3, 4, 1, 2)
    return predictions.clone(memory_format=torch.contiguous_format).flatten(1, 3)


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Clip boxes (..., 4) to an image of ``size`` (height, width)."""
    corners = [edge.clamp(min=0, max=size[1 - axis % 2]) for axis, edge in enumerate(boxes.unbind(-1))]
    return torch.stack(corners, dim=-1)


def is_nonempty(boxes: Tensor, threshold: float = 0.0) -> Tensor:
    """Return whether both sides of boxes (..., 4) are longer than ``threshold`` pixels, as (...) bool."""
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left > threshold) & (bottom - top > threshold)


# -- selection -------------------------------------------------------------------------------------


def padded_topk(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the ``number`` largest values of each row of (B, N) and their indices, both (B, number), largest first.

    Shorter rows are completed with minus infinity and index 0.
    """
    # Pad after the values: with padding before them, AVX-512 code compiled by torch 2.14 reads out of bounds.
    best, index = F.pad(scores, (0, number), value=-math.inf).topk(number, dim=1)
    return best, index * (index < scores.shape[1])


def topk_above(scores: Tensor, threshold: float, number: int, *, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, indices and values, (N,) each, of the ``number`` largest values above ``threshold`` of each row.

    Args:
        scores: (B, M). B is 1 unless ``batched``.
        threshold: Lower values are not returned.
        number: Maximum number of values of each row.
        batched: Whether B may be larger than 1.
    """
    if batched:
        best, index = padded_topk(scores, number)
        row, rank = (best > threshold).nonzero().unbind(1)
        return row, index[row, rank], best[row, rank]
    # Few scores pass the threshold. This is 2 to 30 times as fast as topk of all scores.
    row, index = (scores > threshold).nonzero().unbind(1)
    _bound_length(index)
    values = scores[row, index]
    best, rank = padded_topk(values[None], number)
    kept = rank[0, (best[0] > threshold).nonzero()[:, 0]]
    return row[kept], index[kept], values[kept]


def grouped_nms(boxes: Tensor, scores: Tensor, group: Tensor, groups_per_image: int, threshold: float) -> Tensor:
    """Apply non-maximum suppression within groups.

    Args:
        boxes: (N, 4).
        scores: (N,).
        group: (N,), non-negative and numbered image by image.
        groups_per_image: The number of groups of each image.
        threshold: The IoU threshold.

    Returns:
        The indices of the kept boxes, highest score first.
    """
    columns = math.ceil(math.sqrt(groups_per_image))
    # max() and min() need a value, even if there is no box.
    ends = F.pad(boxes.flatten(), (0, 1))
    cell = ends.max() - ends.min() + 1
    offset = torch.stack([group % columns, _divide(group, columns)], dim=1).to(boxes.dtype) * cell
    # For torch.export, torchvision declares that nms keeps at least two boxes, so append two empty boxes at the end.
    # Their scores are finite, because OpenVINO drops boxes with a score of minus infinity.
    boxes = F.pad(boxes + offset.repeat(1, 2), (0, 0, 0, 2))
    return nms(boxes, F.pad(scores, (0, 2), value=_LOWEST), _overlap_threshold(threshold))[:-2]


def _overlap_threshold(threshold: float) -> float:
    """Return a threshold with which every runtime drops the boxes that torchvision drops with ``threshold``.

    torchvision compares the IoU in float32 with the threshold in float64 (dropped if above). ONNX compares with the
    threshold in float32 (dropped if above), and OpenVINO too (dropped if equal or above).
    """
    last_kept = np.float32(threshold)
    if float(last_kept) > threshold:
        last_kept = np.nextafter(last_kept, np.float32(0))
    first_dropped = np.nextafter(last_kept, np.float32(1))
    # Only OpenVINO and TorchScript files are traced. Their threshold is between both values in float64. It is closer to
    # first_dropped, so float32 rounds it to first_dropped.
    return 0.25 * float(last_kept) + 0.75 * float(first_dropped) if torch.jit.is_tracing() else float(last_kept)


def _rank_in_image(image: Tensor, num_images: int) -> Tensor:
    """Return for each entry of (N,) the number of earlier entries of the same image, (N,) int64."""
    # (N, B) in float32, which is exact here, because not every runtime has an int64 cumulative sum.
    of_image = (image[:, None] == torch.arange(num_images, device=image.device)).float()
    return (of_image.cumsum(0) * of_image).sum(1).long() - 1


def _divide(index: Tensor, number: int) -> Tensor:
    """Return ``index // number`` for non-negative values. In ONNX, ``//`` would become sign tests of booleans."""
    return torch.div(index, number, rounding_mode="trunc")


def _bound_length(x: Tensor) -> None:
    """Bound the length of ``x`` for ``torch.export``, so that products with it fit ONNX."""
    if not torch.jit.is_tracing():
        torch._check(x.shape[0] <= 2**31)


def pad_detections(detections: dict[str, Tensor], *, number: int, num_images: int) -> dict[str, Tensor]:
    """Return ``number`` rows for each image: its detections, then zeros.

    Args:
        detections: (D, ...) each, with ``image_index`` (D,); highest score first, at most ``number`` per image.
        num_images: B.

    Returns:
        (B, number, ...) each, without ``image_index``, and ``count`` (B,) int64, the number of detections per image.
    """
    image = detections["image_index"]
    rank = _rank_in_image(image, num_images)
    rows = {
        name: value.new_zeros(num_images, number, *value.shape[1:]).index_put_((image, rank), value)
        for name, value in detections.items()
        if name != "image_index"
    }
    of_image = image[:, None] == torch.arange(num_images, device=image.device)
    return rows | {"count": of_image.long().sum(0)}


def unpad_detections(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Invert :func:`pad_detections`: return (D, ...) each, highest score first, with ``image_index``."""
    count = rows["count"]
    is_real = torch.arange(rows["scores"].shape[1], device=count.device) < count[:, None]
    detections = {name: value[is_real] for name, value in rows.items() if name != "count"}
    detections["image_index"] = is_real.nonzero()[:, 0]
    order = detections["scores"].argsort(descending=True, stable=True)
    return {name: value[order] for name, value in detections.items()}


# -- regions ---------------------------------------------------------------------------------------


def pool(pooler: ROIPooler, features: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
    """Apply RoIAlign to boxes (P, 4) of images (P,), each on the feature level of its size, in float32: (P, C, S, S).

    Source: FPN (Lin et al. 2017), equation 1, as in detectron2's ``ROIPooler``.
    """
    first, last = pooler.min_level, pooler.max_level
    size = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    level = torch.floor(pooler.canonical_level + torch.log2(size / pooler.canonical_box_size + 1e-8))
    level = level.clamp(min=first, max=last).long() - first
    regions = torch.cat([image[:, None].to(boxes.dtype), boxes], dim=1)
    pooled = features[0].new_zeros(boxes.shape[0], features[0].shape[1], *pooler.output_size)
    for index, (feature, layer) in enumerate(zip(features, pooler.level_poolers, strict=True)):
        rows = (level == index).nonzero()[:, 0]
        pooled = pooled.index_copy(0, rows, layer(feature.float(), regions[rows]).to(pooled.dtype))
    return pooled


# -- detectors -------------------------------------------------------------------------------------


class ExportableDetector(nn.Module):
    """A detector as a function from one image tensor to plain tensors.

    Subclasses implement ``detect``, from the FPN features by name and the image size (height, width) to the outputs by
    name, including ``image_index``.

    Args:
        detector: A detectron2 model in eval mode.
        batched: Whether the input is a batch of images of one size.
        fixed_number: Number of detections per image, see :func:`pad_detections`; ``None`` for a variable number.
        size: Height and width of all images; ``None`` for any size.

    Input: (3, H, W), or (B, 3, H, W) if batched; uint8 or float, 0 to 255, with channels in the order of
    ``INPUT.FORMAT``.

    Output: a tuple in the order of ``output_names``:

    - boxes (D, 4): XYXY in pixels of the input, clipped to the image and not empty;
    - scores (D,): float32, highest first;
    - classes (D,): int64;
    - masks (D, 1, S, S), only for Mask R-CNN: the probability of each pixel of the box, S = 28 by default;
    - image_index (D,), only if batched: int64.

    With ``fixed_number`` N, each is (N, ...), or (B, N, ...) if batched. ``image_index`` is replaced by count, (1,) or
    (B,), int64: the number of rows that are detections.
    """

    def __init__(
        self, detector: nn.Module, *, batched: bool, fixed_number: int | None, size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.detector = detector
        self.batched = batched
        self.fixed_number = fixed_number
        self.size = size
        self.has_masks = isinstance(detector, GeneralizedRCNN) and detector.roi_heads.mask_on
        self.input_names = ("images",) if batched else ("image",)
        self.output_names: tuple[str, ...] = ("boxes", "scores", "classes", *(["masks"] if self.has_masks else []))
        if fixed_number is not None:
            self.output_names += ("count",)
        elif batched:
            self.output_names += ("image_index",)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return the detections of an image or a batch, see the class."""
        image = image.to(torch.promote_types(self.detector.pixel_mean.dtype, torch.float32))
        images = image if self.batched else image[None]
        size, backbone = (images.shape[2], images.shape[3]), self.detector.backbone
        images = (images - self.detector.pixel_mean.float()) / self.detector.pixel_std.float()
        images = pad_to_multiple(images, max(backbone.size_divisibility, 1))
        outputs = self.detect(backbone(images.to(next(backbone.parameters()).dtype)), size)
        if self.fixed_number is not None:
            num_images = images.shape[0] if self.batched else 1
            rows = pad_detections(outputs, number=self.fixed_number, num_images=num_images)
            outputs = {name: value if self.batched or name == "count" else value[0] for name, value in rows.items()}
        return tuple(outputs[name] for name in self.output_names)

    def _best(self, kept: Tensor, image: Tensor, number: int, features: dict[str, Tensor]) -> Tensor:
        """Return the first ``number`` indices in ``kept`` of each image, or all if ``number`` is negative."""
        if number < 0:
            return kept
        if not self.batched:
            return kept[:number]
        num_images = next(iter(features.values())).shape[0]
        return kept[_rank_in_image(image[kept], num_images) < number]


class ExportableRetinaNet(ExportableDetector):
    """RetinaNet."""

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        model = self.detector
        levels = [features[name] for name in model.head_in_features]
        logits, deltas = model.head(levels)
        candidates = []
        for level, anchors in enumerate(grid_anchors(model.anchor_generator, [level.shape[2:] for level in levels])):
            image, index, scores = topk_above(
                per_anchor(logits[level], model.num_classes).float().sigmoid().flatten(1),
                model.test_score_thresh,
                model.test_topk_candidates,
                batched=self.batched,
            )
            anchor = _divide(index, model.num_classes)
            chosen = per_anchor(deltas[level], 4)[image, anchor]
            boxes = model.box2box_transform.apply_deltas(chosen, anchors[anchor])
            candidates.append((boxes, scores, index % model.num_classes, image))
        # (N, 4) and (N,)
        boxes, scores, classes, image = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        kept = grouped_nms(boxes, scores, image * model.num_classes + classes, model.num_classes, model.test_nms_thresh)
        kept = self._best(kept, image, model.max_detections_per_image, features)
        return _nonempty(clip(boxes[kept], size), scores[kept], classes[kept], image[kept])


class ExportableRCNN(ExportableDetector):
    """Faster, Mask or Cascade R-CNN.

    Each cascade stage refines the boxes of the previous one. The final boxes and the score threshold belong to the last
    stage, and the scores are the mean of all stages (Cai and Vasconcelos 2018, section 4).
    """

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        heads = self.detector.roi_heads
        proposals, image = self._propose(features, size)
        levels = [features[name] for name in heads.box_in_features]
        scores, boxes = self._predict(levels, proposals, image, size)
        outputs = self._select(scores, boxes, image, features)
        if self.has_masks:
            levels = [features[name] for name in heads.mask_in_features]
            pooled = pool(heads.mask_pooler, levels, outputs["boxes"], outputs["image_index"])
            logits = heads.mask_head.layers(pooled).float()
            if logits.shape[1] > 1:
                # (D, K, S, S) -> (D, 1, S, S)
                classes = outputs["classes"][:, None, None, None]
                logits = logits.gather(1, classes.expand(-1, 1, *logits.shape[2:]))
            outputs["masks"] = logits.sigmoid()
        return outputs

    def _propose(self, features: dict[str, Tensor], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the proposals (P, 4) and the index of their images (P,)."""
        rpn = self.detector.proposal_generator
        levels = [features[name] for name in rpn.in_features]
        logits, deltas = rpn.rpn_head(levels)
        scores, boxes = [], []
        for level, anchors in enumerate(grid_anchors(rpn.anchor_generator, [level.shape[2:] for level in levels])):
            level_scores = per_anchor(logits[level], 1).float().flatten(1)
            best, index = padded_topk(level_scores, rpn.pre_nms_topk[False])
            chosen = per_anchor(deltas[level], 4).gather(1, index[..., None].expand(-1, -1, 4))
            decoded = rpn.box2box_transform.apply_deltas(chosen.flatten(0, 1), anchors[index].flatten(0, 1))
            boxes.append(decoded.unflatten(0, index.shape))
            scores.append(best)
        # (B, L * topk, ...)
        scores, boxes = torch.cat(scores, 1), clip(torch.cat(boxes, 1), size)
        image, candidate = (scores.isfinite() & is_nonempty(boxes, rpn.min_box_size)).nonzero().unbind(1)
        scores, boxes = scores[image, candidate], boxes[image, candidate]
        group = image * len(levels) + _divide(candidate, rpn.pre_nms_topk[False])
        kept = grouped_nms(boxes, scores, group, len(levels), rpn.nms_thresh)
        kept = self._best(kept, image, rpn.post_nms_topk[False], features)
        return boxes[kept], image[kept]

    def _predict(
        self, levels: list[Tensor], proposals: Tensor, image: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of classes and background (P, K + 1) and the boxes (P, K or 1, 4) of proposals (P, 4)."""
        heads, scores = self.detector.roi_heads, []
        box_heads = heads.box_head if isinstance(heads, CascadeROIHeads) else [heads.box_head]
        for head, predictor in zip(box_heads, _box_predictors(heads), strict=True):
            logits, deltas = predictor(head(pool(heads.box_pooler, levels, proposals, image)))
            logits = logits.float()
            scores.append(logits.sigmoid() if predictor.use_sigmoid_ce else logits.softmax(dim=1))
            boxes = clip(predictor.box2box_transform.apply_deltas(deltas, proposals).unflatten(1, (-1, 4)), size)
            # Cascade stages have one box for all classes.
            proposals = boxes[:, 0]
        return sum(scores) * (1.0 / len(scores)), boxes

    def _select(self, scores: Tensor, boxes: Tensor, image: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the detections from the scores and boxes of all classes."""
        predictor = _box_predictors(self.detector.roi_heads)[-1]
        num_groups = scores.shape[1]
        _bound_length(scores)
        is_finite = boxes.isfinite().flatten(1).all(1) & scores.isfinite().all(1)
        # The last column is the background.
        is_above = scores[:, :-1] > predictor.test_score_thresh
        row, classes = (is_above & is_finite[:, None]).nonzero().unbind(1)
        boxes = boxes[row, classes if boxes.shape[1] > 1 else torch.zeros_like(classes)]
        scores, image = scores[row, classes], image[row]
        kept = grouped_nms(boxes, scores, image * num_groups + classes, num_groups, predictor.test_nms_thresh)
        kept = self._best(kept, image, predictor.test_topk_per_image, features)
        return _nonempty(boxes[kept], scores[kept], classes[kept], image[kept])


def _nonempty(boxes: Tensor, scores: Tensor, classes: Tensor, image: Tensor) -> dict[str, Tensor]:
    """Return the detections with non-empty boxes, by output name."""
    kept = is_nonempty(boxes).nonzero()[:, 0]
    return {"boxes": boxes[kept], "scores": scores[kept], "classes": classes[kept], "image_index": image[kept]}


def _box_predictors(heads: nn.Module) -> list[nn.Module]:
    return list(heads.box_predictor) if isinstance(heads, CascadeROIHeads) else [heads.box_predictor]


def make_exportable(
    detector: nn.Module, *, batched: bool = False, fixed_number: int | None = None, size: tuple[int, int] | None = None
) -> ExportableDetector:
    """Return the exportable equivalent of a detector, in eval mode. It shares the parameters of the detector.

    Args:
        detector: A detectron2 model.
        batched, fixed_number, size: See :class:`ExportableDetector`.

    Raises:
        ConfigError: If a part of the detector cannot be exported.
    """
    _check("META_ARCHITECTURE", detector, RetinaNet, GeneralizedRCNN)
    if isinstance(detector, RetinaNet):
        exportable = ExportableRetinaNet
    else:
        heads = detector.roi_heads
        _check("Proposal generator", detector.proposal_generator, RPN)
        _check("ROI_HEADS", heads, StandardROIHeads, CascadeROIHeads)
        if heads.keypoint_on:
            raise ConfigError(f"{type(heads.keypoint_head).__name__} cannot be exported. Set MODEL.KEYPOINT_ON False.")
        if heads.mask_on:
            _check("Mask head", heads.mask_head, MaskRCNNConvUpsampleHead)
        exportable = ExportableRCNN
    return exportable(detector, batched=batched, fixed_number=fixed_number, size=size).eval()


def _check(name: str, part: object, *supported: type) -> None:
    if type(part) not in supported:
        names = " or ".join(cls.__name__ for cls in supported)
        raise ConfigError(f"{name} {type(part).__name__} cannot be exported. Use {names}.")
