"""Detectors written so that all exporters take them: the same answers as detectron2's, in fixed steps on plain tensors.

detectron2's own inference branches on numbers that depend on the image, makes lists of Instances and loops over
classes; torch.export refuses that. Here is its equivalent in one place. Letters: B images, L levels, A anchors a place,
K classes, N candidates, P proposals, D detections.

- What is fewer than asked for is filled up: a level with fewer than ``topk`` candidates gets some with a score that
  never passes, so that no number of candidates is decided while the model is recorded.
- Non-maximum suppression of groups (classes, levels, images) is one call: each group is moved to a field of its own on
  a grid. In a row, as torchvision has them, the last of 80 classes would lie at 10^5 pixels, where float32 rounds to
  0.008 pixels; on a grid it is a tenth of that.
- "The best n of each image" is a comparison of ranks, not a loop over images.
"""

import math

import torch
import torch.nn.functional as F
from detectron2.layers import ROIAlign
from detectron2.modeling import GeneralizedRCNN, RetinaNet, StandardROIHeads
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import Tensor, nn
from torchvision.ops import nms, roi_align

from backbones import InputError


class ExportableDetector(nn.Module):
    """A detector as a function of one tensor of pixels to plain tensors.

    Args:
        detector: in eval mode.
        batched: whether the input is a batch of images of one size.

    Input: (3, H, W), or (B, 3, H, W) if batched: uint8 or floating point, 0 to 255, channels in ``INPUT.FORMAT``.

    Output: a tuple, in the order of ``output_names``: boxes (D, 4), XYXY in pixels of the input, inside the image and
    with an area; scores (D,), float32, from the highest; classes (D,), int64; with masks, masks (D, 1, S, S), the
    probability of each place of a box, S = 28 by default; if batched, image_index (D,), int64.
    """

    def __init__(self, detector: nn.Module, *, batched: bool = False) -> None:
        super().__init__()
        self.detector = detector
        self.batched = batched
        self.input_names = ("images",) if batched else ("image",)
        self.output_names: tuple[str, ...] = ("boxes", "scores", "classes")
        if batched:
            self.output_names += ("image_index",)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        images = image if self.batched else image[None]
        size = images.shape[2], images.shape[3]
        outputs = self.detect(self.detector.backbone(self._normalised(images)), size)
        return tuple(outputs[name] for name in self.output_names)

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        """The maps of FPN for images of ``size`` -> all outputs by name."""
        raise NotImplementedError

    def _images(self, image: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor | int]:
        """Which image each box is of, where there may be several."""
        return {"image": image, "num_images": next(iter(features.values())).shape[0]} if self.batched else {}

    def _normalised(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), 0 to 255 -> normalised, padded below and on the right for FPN, in the model's type."""
        mean, std = self.detector.pixel_mean, self.detector.pixel_std
        images = (images.to(torch.promote_types(mean.dtype, torch.float32)) - mean.float()) / std.float()
        divisor = max(self.detector.backbone.size_divisibility, 1)
        height, width = images.shape[2], images.shape[3]
        # In this form a recorded size is a product with the divisor, and all that follow from it are simple.
        rows, cols = (height + divisor - 1) // divisor, (width + divisor - 1) // divisor
        images = F.pad(images, (0, cols * divisor - width, 0, rows * divisor - height))
        return images.to(next(self.detector.backbone.parameters()).dtype)


class ExportableRetinaNet(ExportableDetector):
    """detectron2's RetinaNet: see :class:`ExportableDetector`."""

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        model = self.detector
        maps = [features[name] for name in model.head_in_features]
        logits, deltas = model.head(maps)
        scores, boxes, classes, image = [], [], [], []
        for level, anchors in enumerate(grid_anchors(model.anchor_generator, maps)):
            of_image, place, best = best_above(
                per_anchor(logits[level], model.num_classes).float().sigmoid().flatten(1),
                model.test_score_thresh,
                model.test_topk_candidates,
                batched=self.batched,
            )
            anchor = place // model.num_classes
            chosen = per_anchor(deltas[level], 4)[of_image, anchor]
            boxes.append(decode(model.box2box_transform, chosen, anchors[anchor]))
            scores.append(best)
            classes.append(place % model.num_classes)
            image.append(of_image)
        # (N,) and (N, 4)
        scores, boxes, classes, image = (torch.cat(parts) for parts in (scores, boxes, classes, image))
        kept = best_without_overlap(
            boxes,
            scores,
            group=image * model.num_classes + classes,
            groups_per_image=model.num_classes,
            **self._images(image, features),
            threshold=model.test_nms_thresh,
            number=model.max_detections_per_image,
        )
        boxes, scores, classes, image = clip(boxes[kept], size), scores[kept], classes[kept], image[kept]
        kept = has_area(boxes).nonzero()[:, 0]
        return {
            "boxes": boxes[kept],
            "scores": scores[kept],
            "classes": classes[kept],
            "image_index": image[kept],
        }


class ExportableRCNN(ExportableDetector):
    """detectron2's Faster or Mask R-CNN: see :class:`ExportableDetector`."""

    def __init__(self, detector: nn.Module, *, batched: bool = False) -> None:
        super().__init__(detector, batched=batched)
        if detector.roi_heads.mask_on:
            self.output_names = (*self.output_names[:3], "masks", *self.output_names[3:])

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        heads = self.detector.roi_heads
        proposals, image = self._proposals(features, size)
        maps = [features[name] for name in heads.box_in_features]
        pooled = pool(heads.box_pooler, maps, proposals, image)
        boxes, scores, classes, image = self._classified(heads.box_head(pooled), proposals, image, size, features)
        outputs = {"boxes": boxes, "scores": scores, "classes": classes, "image_index": image}
        if heads.mask_on:
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
            group=image * len(maps) + candidate // rpn.pre_nms_topk[False],
            groups_per_image=len(maps),
            **self._images(image, features),
            threshold=rpn.nms_thresh,
            number=rpn.post_nms_topk[False],
        )
        return boxes[kept], image[kept]

    def _classified(
        self,
        pooled: Tensor,
        proposals: Tensor,
        image: Tensor,
        size: tuple[int, int],
        features: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Boxes (D, 4), scores (D,), classes (D,) and images (D,) of the detections."""
        predictor = self.detector.roi_heads.box_predictor
        logits, deltas = predictor(pooled)
        # (P, K), without the background, which is last
        logits = logits.float()
        scores = (logits.sigmoid() if predictor.use_sigmoid_ce else logits.softmax(dim=1))[:, :-1]
        # (P, K or 1, 4)
        deltas = deltas.unflatten(1, (-1, 4))
        boxes = clip(decode(predictor.box2box_transform, deltas, proposals[:, None]), size)
        check_writable(scores)
        is_finite = boxes.isfinite().flatten(1).all(1) & logits.isfinite().all(1)
        row, classes = ((scores > predictor.test_score_thresh) & is_finite[:, None]).nonzero().unbind(1)
        boxes = boxes[row, classes if deltas.shape[1] > 1 else torch.zeros_like(classes)]
        scores, image = scores[row, classes], image[row]
        kept = best_without_overlap(
            boxes,
            scores,
            group=image * logits.shape[1] + classes,
            groups_per_image=logits.shape[1],
            **self._images(image, features),
            threshold=predictor.test_nms_thresh,
            number=predictor.test_topk_per_image,
        )
        boxes, scores, classes, image = boxes[kept], scores[kept], classes[kept], image[kept]
        kept = has_area(boxes).nonzero()[:, 0]
        return boxes[kept], scores[kept], classes[kept], image[kept]


def make_exportable(detector: nn.Module, *, batched: bool = False) -> ExportableDetector:
    """The exportable equivalent of a detector, which shares its parameters, in eval mode.

    Raises:
        InputError: for a detector with parts that have no equivalent here.
    """
    for name, part, kinds in _parts(detector):
        if type(part) not in kinds:
            known = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"a detector whose {name} is a {type(part).__name__} cannot be exported: it is {known}")
    if isinstance(detector, RetinaNet) and detector.max_detections_per_image < 0:
        raise InputError("TEST.DETECTIONS_PER_IMAGE is below 0: detectron2's RetinaNet drops its last detection then")
    make = ExportableRetinaNet if isinstance(detector, RetinaNet) else ExportableRCNN
    return make(detector, batched=batched).eval()


def _parts(detector: nn.Module) -> list[tuple[str, object, tuple[type, ...]]]:
    """What there is an equivalent for: name, part, and the types that it may have."""
    parts: list[tuple[str, object, tuple[type, ...]]] = [
        ("META_ARCHITECTURE", detector, (RetinaNet, GeneralizedRCNN)),
    ]
    if type(detector) is RetinaNet:
        return [*parts, ("anchor generator", detector.anchor_generator, (DefaultAnchorGenerator,))]
    if type(detector) is not GeneralizedRCNN:
        return parts
    rpn, heads = detector.proposal_generator, detector.roi_heads
    parts += [("proposal generator", rpn, (RPN,)), ("ROI_HEADS", heads, (StandardROIHeads,))]
    if type(rpn) is not RPN or type(heads) is not StandardROIHeads:
        return parts
    parts += [
        ("anchor generator", rpn.anchor_generator, (DefaultAnchorGenerator,)),
        ("box predictor", heads.box_predictor, (FastRCNNOutputLayers,)),
        ("keypoint head", heads.keypoint_head if heads.keypoint_on else None, (type(None),)),
    ]
    poolers = [heads.box_pooler]
    if heads.mask_on:
        parts.append(("mask head", heads.mask_head, (MaskRCNNConvUpsampleHead,)))
        poolers.append(heads.mask_pooler)
    for pooler in poolers:
        parts.append(("pooler", pooler, (ROIPooler,)))
        parts += [("pooler's layer", layer, (ROIAlign,)) for layer in getattr(pooler, "level_poolers", ())]
    return parts


# -- steps -----------------------------------------------------------------------------------------


def per_anchor(predictions: Tensor, channels: int) -> Tensor:
    """(B, A * channels, H, W) -> (B, H * W * A, channels), in the order of :func:`grid_anchors`."""
    # A copy in any case: whether the axes can be joined without one depends on the size that is recorded.
    predictions = predictions.unflatten(1, (-1, channels)).permute(0, 3, 4, 1, 2)
    return predictions.clone(memory_format=torch.contiguous_format).flatten(1, 3)


def grid_anchors(generator: DefaultAnchorGenerator, maps: list[Tensor]) -> list[Tensor]:
    """The anchors of each map, (H * W * A, 4), XYXY in pixels: as ``generator`` makes them."""
    anchors = []
    for level, stride, cell in zip(maps, generator.strides, generator.cell_anchors, strict=True):
        top, left = (
            (torch.arange(size, dtype=torch.float32, device=cell.device) + generator.offset) * stride
            for size in level.shape[2:]
        )
        # (H, W, 1, 4) and (A, 4)
        top, left = torch.meshgrid(top, left, indexing="ij")
        shifts = torch.stack([left, top, left, top], dim=-1)[:, :, None]
        anchors.append((shifts + cell.float()).flatten(0, 2))
    return anchors


def best_of_row(scores: Tensor, number: int, *, filler: float) -> tuple[Tensor, Tensor]:
    """The ``number`` largest values of each row and their places, from the largest: (B, N) -> (B, number) twice.

    Of a row that has fewer, the rest is ``filler``, at place 0.
    """
    # Put before the values, the fillers are known by their place alone, whatever N is.
    best, place = F.pad(scores, (number, 0), value=filler).topk(number, dim=1)
    return best, (place - number).clamp(min=0)


def best_above(scores: Tensor, threshold: float, number: int, *, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The ``number`` largest values of each row that are above ``threshold``: rows, places and values, (N,) each.

    Args:
        scores: (B, N'), B of 1 where not ``batched``.
    """
    if batched:
        best, place = best_of_row(scores, number, filler=-math.inf)
        row, rank = (best > threshold).nonzero().unbind(1)
        return row, place[row, rank], best[row, rank]
    # Few of the millions of a large map pass: two to thirty times as fast as looking for the best of all.
    row, place = (scores > threshold).nonzero().unbind(1)
    check_writable(place)
    values = scores[row, place]
    best, index = best_of_row(values[None], number, filler=-math.inf)
    kept = index[0, (best[0] > threshold).nonzero()[:, 0]]
    return row[kept], place[kept], values[kept]


def check_writable(x: Tensor) -> None:
    """Tell ``torch.export`` a bound for the length of ``x``; that of a product with it could be too large for ONNX."""
    if not torch.jit.is_tracing():
        torch._check(x.shape[0] <= 2**31)


def decode(transform, deltas: Tensor, anchors: Tensor) -> Tensor:
    """Boxes (..., 4) that ``deltas`` (..., 4) make of ``anchors`` (..., 4): ``apply_deltas``, in float32."""
    deltas = deltas.float().unbind(-1)
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas, transform.weights, strict=True))
    left, top, right, bottom = anchors.unbind(-1)
    width, height = right - left, bottom - top
    center_x, center_y = left + 0.5 * width + dx * width, top + 0.5 * height + dy * height
    half_width = 0.5 * (dw.clamp(max=transform.scale_clamp).exp() * width)
    half_height = 0.5 * (dh.clamp(max=transform.scale_clamp).exp() * height)
    corners = center_x - half_width, center_y - half_height, center_x + half_width, center_y + half_height
    return torch.stack(corners, dim=-1)


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """The part of the boxes (..., 4) that is inside an image of ``size`` (height, width)."""
    height, width = size
    left, top, right, bottom = boxes.unbind(-1)
    corners = [
        left.clamp(min=0, max=width),
        top.clamp(min=0, max=height),
        right.clamp(min=0, max=width),
        bottom.clamp(min=0, max=height),
    ]
    return torch.stack(corners, dim=-1)


def has_area(boxes: Tensor, least: float = 0.0) -> Tensor:
    """(..., 4) -> (...): whether both sides are longer than ``least`` pixels."""
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left > least) & (bottom - top > least)


def best_without_overlap(
    boxes: Tensor,
    scores: Tensor,
    *,
    group: Tensor,
    groups_per_image: int,
    threshold: float,
    number: int,
    image: Tensor | None = None,
    num_images: int = 1,
) -> Tensor:
    """Non-maximum suppression within groups, then the best of each image.

    Args:
        boxes: (N, 4). scores: (N,).
        group: (N,), 0 to ``num_images * groups_per_image - 1``.
        threshold: of the overlap.
        number: that are kept of each image; below 0 all.
        image: (N,), 0 to ``num_images - 1``; None for one image.

    Returns:
        Indices of the kept, the highest score first.
    """
    columns = math.ceil(math.sqrt(groups_per_image))
    # With a value of their own, because there may be no box.
    ends = F.pad(boxes.flatten(), (0, 1))
    field = ends.max() - ends.min() + 1
    offset = torch.stack([group % columns, group // columns], dim=1).to(boxes.dtype) * field
    # torchvision tells torch.export that it keeps two boxes or more: two without an area see to that, and come last.
    boxes = F.pad(boxes + offset.repeat(1, 2), (0, 0, 0, 2))
    kept = nms(boxes, F.pad(scores, (0, 2), value=-math.inf), threshold)[:-2]
    if number < 0:
        return kept
    if image is None:
        return kept[:number]
    # (N', B): how many of each image there are up to here
    of_image = image[kept][:, None] == torch.arange(num_images, device=kept.device)
    rank = (of_image.long().cumsum(0) * of_image).sum(1)
    return kept[rank <= number]


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
        pooled = pooled.index_put((rows,), values.to(pooled.dtype))
    return pooled


def of_class(masks: Tensor, classes: Tensor) -> Tensor:
    """The mask of each detection's class: (D, K or 1, S, S), (D,) -> (D, 1, S, S)."""
    if masks.shape[1] == 1:
        return masks
    index = classes[:, None, None, None].expand(-1, 1, masks.shape[2], masks.shape[3])
    return masks.gather(1, index)
