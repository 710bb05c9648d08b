"""Detectors written so that every exporter accepts them: detectron2's answers, in fixed steps on plain tensors.

detectron2's own inference branches on numbers that depend on the image, builds lists of Instances and loops over
classes. ``detectron2.export.TracingAdapter`` makes that traceable, but ``torch.export`` refuses it. Here is the
equivalent, which shares the parameters of the detector. Letters: B images, A anchors per pixel, K classes, N
candidates, P proposals, D detections.

- Where there are fewer candidates than are asked for, the list is padded with a score that never passes, so that no
  number of candidates is fixed when the model is traced.
- Non-maximum suppression of several groups (classes, levels, images) is one call: each group is shifted to its own
  cell of a square grid. ``torchvision.ops.batched_nms`` shifts them along a line, on which the last of 80 classes
  lies at 10^5 pixels and float32 rounds to 0.008 pixels; in a grid it is a tenth of that.
- "The best n of each image" is a comparison of ranks, not a loop over images.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.layers import ROIAlign
from detectron2.modeling import GeneralizedRCNN, RetinaNet, StandardROIHeads
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import Tensor, nn
from torchvision.ops import nms

from backbones import ConfigError

_LEAST = -1e30  # below every score


# -- anchors and boxes -----------------------------------------------------------------------------


def per_anchor(predictions: Tensor, channels: int) -> Tensor:
    """(B, A * channels, H, W) -> (B, H * W * A, channels), in the order of :func:`grid_anchors`."""
    # Always a copy: whether the axes can be joined without one depends on the size of the example.
    predictions = predictions.unflatten(1, (-1, channels)).permute(0, 3, 4, 1, 2)
    return predictions.clone(memory_format=torch.contiguous_format).flatten(1, 3)


def grid_anchors(generator: DefaultAnchorGenerator, features: list[Tensor]) -> list[Tensor]:
    """Return the anchors of each feature map, (H * W * A, 4), XYXY in pixels, equal to those of ``generator``."""
    anchors = []
    for level, stride, cell in zip(features, generator.strides, generator.cell_anchors, strict=True):
        top, left = (
            (torch.arange(size, dtype=torch.float32, device=cell.device) + generator.offset) * stride
            for size in level.shape[2:]
        )
        # (H, W, 1, 4) and (A, 4)
        top, left = torch.meshgrid(top, left, indexing="ij")
        shifts = torch.stack([left, top, left, top], dim=-1)[:, :, None]
        anchors.append((shifts + cell.float()).flatten(0, 2))
    return anchors


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the part of the boxes (..., 4) that is inside an image of ``size`` (height, width)."""
    corners = [edge.clamp(min=0, max=size[1 - axis % 2]) for axis, edge in enumerate(boxes.unbind(-1))]
    return torch.stack(corners, dim=-1)


def is_nonempty(boxes: Tensor, least: float = 0.0) -> Tensor:
    """Return whether both sides of the boxes (..., 4) are longer than ``least`` pixels: (...)."""
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left > least) & (bottom - top > least)


# -- the best of many candidates -------------------------------------------------------------------


def padded_topk(scores: Tensor, number: int, *, padding: float) -> tuple[Tensor, Tensor]:
    """Return the ``number`` largest values of each row of (B, N), and their indices, each (B, number), largest first.

    Rows with fewer values are completed by ``padding``, with index 0.
    """
    # Padding comes after the values: with it before them, code that torch 2.14 compiles for AVX-512 reads beyond them.
    best, index = F.pad(scores, (0, number), value=padding).topk(number, dim=1)
    return best, index * (index < scores.shape[1])


def topk_above(scores: Tensor, threshold: float, number: int, *, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``number`` largest values of each row that are above ``threshold``: rows, indices and values, (N,).

    Args:
        scores: (B, N'), with B of 1 if not ``batched``.
    """
    if batched:
        best, index = padded_topk(scores, number, padding=-math.inf)
        row, rank = (best > threshold).nonzero().unbind(1)
        return row, index[row, rank], best[row, rank]
    # Few of the millions of scores of a large map pass: this is 2 to 30 times as fast as topk of all.
    row, index = (scores > threshold).nonzero().unbind(1)
    _bound_length(index)
    values = scores[row, index]
    best, rank = padded_topk(values[None], number, padding=-math.inf)
    kept = rank[0, (best[0] > threshold).nonzero()[:, 0]]
    return row[kept], index[kept], values[kept]


def grouped_nms(boxes: Tensor, scores: Tensor, group: Tensor, groups_per_image: int, threshold: float) -> Tensor:
    """Apply non-maximum suppression within groups.

    Args:
        boxes: (N, 4).
        scores: (N,).
        group: (N,), from 0; those of the first image, then those of the second, and so on.
        threshold: IoU threshold.

    Returns:
        Indices of the kept boxes, highest score first.
    """
    columns = math.ceil(math.sqrt(groups_per_image))
    # One more value, because there may be no box.
    ends = F.pad(boxes.flatten(), (0, 1))
    cell = ends.max() - ends.min() + 1
    offset = torch.stack([group % columns, _divide(group, columns)], dim=1).to(boxes.dtype) * cell
    # torchvision registers nms with torch.export as keeping at least two boxes: two without an area, which come last,
    # ensure it.
    # OpenVINO would drop scores of minus infinity.
    boxes = F.pad(boxes + offset.repeat(1, 2), (0, 0, 0, 2))
    return nms(boxes, F.pad(scores, (0, 2), value=_LEAST), _overlap_threshold(threshold))[:-2]


def _overlap_threshold(threshold: float) -> float:
    """Return the number for which each runtime drops the boxes that torchvision drops for ``threshold``.

    torchvision drops a box whose IoU, in float32, is above the threshold in float64; ONNX above the threshold in
    float32; OpenVINO, whose models are traced, from the threshold in float32 on.
    """
    last_kept = np.float32(threshold)
    if float(last_kept) > threshold:
        last_kept = np.nextafter(last_kept, np.float32(0))
    first_dropped = np.nextafter(last_kept, np.float32(1))
    # Between the two, so that it is right in float64 too; nearest to the second, to which it rounds in float32.
    return 0.25 * float(last_kept) + 0.75 * float(first_dropped) if torch.jit.is_tracing() else float(last_kept)


def _rank_in_image(image: Tensor, num_images: int) -> Tensor:
    """Return how many entries before each one are of the same image: (N,) -> (N,) int64."""
    # (N, B) in float32, which is exact here: not every runtime has an int64 cumulative sum.
    of_image = (image[:, None] == torch.arange(num_images, device=image.device)).float()
    return (of_image.cumsum(0) * of_image).sum(1).long() - 1


def _divide(index: Tensor, number: int) -> Tensor:
    """``index // number`` for values >= 0; ``//`` itself becomes sign tests of booleans in ONNX."""
    return torch.div(index, number, rounding_mode="trunc")


def _bound_length(x: Tensor) -> None:
    """Give ``torch.export`` a bound for the length of ``x``; products with it could be too large for ONNX."""
    if not torch.jit.is_tracing():
        torch._check(x.shape[0] <= 2**31)


def pad_detections(detections: dict[str, Tensor], *, number: int, num_images: int) -> dict[str, Tensor]:
    """Return ``number`` rows for each image: its detections, then zeros.

    Args:
        detections: (D, ...) each, best of an image first, with ``image_index``, (D,); at most ``number`` per image.
        num_images: B.

    Returns:
        (B, number, ...) each, without ``image_index``, and ``count``, (B,) int64: how many rows are detections.
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
    """Invert :func:`pad_detections`: (D, ...) each, highest score of all images first, with ``image_index``."""
    count = rows["count"]
    is_real = torch.arange(rows["scores"].shape[1], device=count.device) < count[:, None]
    detections = {name: value[is_real] for name, value in rows.items() if name != "count"}
    detections["image_index"] = is_real.nonzero()[:, 0]
    order = detections["scores"].argsort(descending=True, stable=True)
    return {name: value[order] for name, value in detections.items()}


# -- regions ---------------------------------------------------------------------------------------


def pool(pooler: ROIPooler, features: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
    """Apply RoIAlign to the boxes (P, 4) of images (P,), each on the level for its size: (P, C, S, S).

    Source: FPN (Lin et al. 2017), equation 1, as in detectron2's ``ROIPooler``. Sampled in float32.
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
    """A detector as a function of one tensor of pixels to plain tensors.

    A subclass has ``detect``: from the FPN's features by name and the height and width of the images to all outputs
    by name, and ``image_index``.

    Args:
        detector: a detector in eval mode.
        batched: whether the input is a batch of images of one size.
        fixed_number: number of detections for each image, see :func:`pad_detections`; None for a variable number.
        size: height and width of all images that the file is for; None for any.

    Input: (3, H, W), or (B, 3, H, W) if batched: uint8 or floating point, 0 to 255, channels in ``INPUT.FORMAT``.

    Output: a tuple, in the order of ``output_names``: boxes (D, 4), XYXY in pixels of the input, inside the image and
    with an area; scores (D,), float32, from the highest; classes (D,), int64; for Mask R-CNN, masks (D, 1, S, S), the
    probability at each pixel of the box, S = 28 by default; if batched, image_index (D,), int64. With ``fixed_number``
    N, all of them are (N, ...), or (B, N, ...) if batched, image_index is left out, and the last is count, (1,) or
    (B,), int64: how many of the rows are detections.
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
        """See the class."""
        image = image.to(torch.promote_types(self.detector.pixel_mean.dtype, torch.float32))
        images = image if self.batched else image[None]
        size = images.shape[2], images.shape[3]
        outputs = self.detect(self.detector.backbone(self._preprocess(images)), size)
        if self.fixed_number is not None:
            num_images = images.shape[0] if self.batched else 1
            rows = pad_detections(outputs, number=self.fixed_number, num_images=num_images)
            outputs = {name: value if self.batched or name == "count" else value[0] for name, value in rows.items()}
        return tuple(outputs[name] for name in self.output_names)

    def _best(self, kept: Tensor, image: Tensor, number: int, features: dict[str, Tensor]) -> Tensor:
        """Return the first ``number`` of the ``kept`` boxes of each image, all if it is negative."""
        if number < 0:
            return kept
        if not self.batched:
            return kept[:number]
        num_images = next(iter(features.values())).shape[0]
        return kept[_rank_in_image(image[kept], num_images) < number]

    def _preprocess(self, images: Tensor) -> Tensor:
        """Normalise (B, 3, H, W), 0 to 255, pad below and on the right for the FPN, and cast to the model's type."""
        images = (images - self.detector.pixel_mean.float()) / self.detector.pixel_std.float()
        divisor = max(self.detector.backbone.size_divisibility, 1)
        height, width = images.shape[2], images.shape[3]
        # As a product with the divisor, so that exporters get simple terms for all sizes that follow from it.
        rows, cols = (height + divisor - 1) // divisor, (width + divisor - 1) // divisor
        images = F.pad(images, (0, cols * divisor - width, 0, rows * divisor - height))
        return images.to(next(self.detector.backbone.parameters()).dtype)


class ExportableRetinaNet(ExportableDetector):
    """detectron2's RetinaNet."""

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        model = self.detector
        levels = [features[name] for name in model.head_in_features]
        logits, deltas = model.head(levels)
        candidates = []
        for level, anchors in enumerate(grid_anchors(model.anchor_generator, levels)):
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
    """detectron2's Faster, Mask or Cascade R-CNN.

    Each head of a cascade moves the boxes of the one before. The boxes and thresholds are those of the last, the scores
    the mean of all (Cai and Vasconcelos 2018, section 4).
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
                # (D, K, S, S) -> (D, 1, S, S), those of the detections' classes
                classes = outputs["classes"][:, None, None, None]
                logits = logits.gather(1, classes.expand(-1, 1, *logits.shape[2:]))
            outputs["masks"] = logits.sigmoid()
        return outputs

    def _propose(self, features: dict[str, Tensor], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return boxes that may hold an object, (P, 4), and their images, (P,)."""
        rpn = self.detector.proposal_generator
        levels = [features[name] for name in rpn.in_features]
        logits, deltas = rpn.rpn_head(levels)
        scores, boxes = [], []
        for level, anchors in enumerate(grid_anchors(rpn.anchor_generator, levels)):
            level_scores = per_anchor(logits[level], 1).float().flatten(1)
            best, index = padded_topk(level_scores, rpn.pre_nms_topk[False], padding=-math.inf)
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
        """Return scores of classes and background, (P, K + 1), and boxes, (P, K or 1, 4), of the proposals (P, 4)."""
        heads, scores = self.detector.roi_heads, []
        box_heads = heads.box_head if isinstance(heads, CascadeROIHeads) else [heads.box_head]
        for head, predictor in zip(box_heads, _box_predictors(heads), strict=True):
            logits, deltas = predictor(head(pool(heads.box_pooler, levels, proposals, image)))
            logits = logits.float()
            scores.append(logits.sigmoid() if predictor.use_sigmoid_ce else logits.softmax(dim=1))
            boxes = clip(predictor.box2box_transform.apply_deltas(deltas, proposals).unflatten(1, (-1, 4)), size)
            # A cascade has one box for all classes, so that none is chosen before the last head.
            proposals = boxes[:, 0]
        return sum(scores) * (1.0 / len(scores)), boxes

    def _select(self, scores: Tensor, boxes: Tensor, image: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the detections among all boxes and classes."""
        predictor = _box_predictors(self.detector.roi_heads)[-1]
        num_groups = scores.shape[1]
        _bound_length(scores)
        is_finite = boxes.isfinite().flatten(1).all(1) & scores.isfinite().all(1)
        # Without the background, which is last.
        is_above = scores[:, :-1] > predictor.test_score_thresh
        row, classes = (is_above & is_finite[:, None]).nonzero().unbind(1)
        boxes = boxes[row, classes if boxes.shape[1] > 1 else torch.zeros_like(classes)]
        scores, image = scores[row, classes], image[row]
        kept = grouped_nms(boxes, scores, image * num_groups + classes, num_groups, predictor.test_nms_thresh)
        kept = self._best(kept, image, predictor.test_topk_per_image, features)
        return _nonempty(boxes[kept], scores[kept], classes[kept], image[kept])


def _nonempty(boxes: Tensor, scores: Tensor, classes: Tensor, image: Tensor) -> dict[str, Tensor]:
    """Return the detections that have an area, by name."""
    kept = is_nonempty(boxes).nonzero()[:, 0]
    return {"boxes": boxes[kept], "scores": scores[kept], "classes": classes[kept], "image_index": image[kept]}


def _box_predictors(heads: nn.Module) -> list[nn.Module]:
    return list(heads.box_predictor) if isinstance(heads, CascadeROIHeads) else [heads.box_predictor]


def make_exportable(
    detector: nn.Module,
    *,
    batched: bool = False,
    fixed_number: int | None = None,
    size: tuple[int, int] | None = None,
) -> ExportableDetector:
    """Return the exportable equivalent of a detector, which shares its parameters, in eval mode.

    Args:
        batched, fixed_number, size: see :class:`ExportableDetector`.

    Raises:
        ConfigError: for a detector with parts that have no equivalent here.
    """
    _check("META_ARCHITECTURE", detector, RetinaNet, GeneralizedRCNN)
    if isinstance(detector, RetinaNet):
        if detector.max_detections_per_image < 0:
            raise ConfigError("TEST.DETECTIONS_PER_IMAGE is below 0: detectron2's RetinaNet then drops a detection")
        exportable = ExportableRetinaNet
    else:
        heads = detector.roi_heads
        _check("proposal generator", detector.proposal_generator, RPN)
        _check("ROI_HEADS", heads, StandardROIHeads, CascadeROIHeads)
        _check("keypoint head", heads.keypoint_head if heads.keypoint_on else None, type(None))
        if heads.mask_on:
            _check("mask head", heads.mask_head, MaskRCNNConvUpsampleHead)
        for pooler in (heads.box_pooler, *([heads.mask_pooler] if heads.mask_on else [])):
            for layer in pooler.level_poolers:
                _check("pooler's layer", layer, ROIAlign)
        exportable = ExportableRCNN
    return exportable(detector, batched=batched, fixed_number=fixed_number, size=size).eval()


def _check(name: str, part: object, *known: type) -> None:
    if type(part) not in known:
        names = " or ".join(one.__name__ for one in known)
        raise ConfigError(f"{name} is a {type(part).__name__}, and only {names} can be exported")
