"""Which equivalent a detector has."""

from detectron2.layers import ROIAlign
from detectron2.modeling import GeneralizedRCNN, RetinaNet, StandardROIHeads
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads import CascadeROIHeads
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead
from torch import nn

from backbones import InputError
from projects_vil.export.exportable.cascade import ExportableCascadeRCNN
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.exportable.rcnn import ExportableRCNN
from projects_vil.export.exportable.retinanet import ExportableRetinaNet

_ROI_HEADS = (StandardROIHeads, CascadeROIHeads)


def make_exportable(
    detector: nn.Module,
    *,
    batched: bool = False,
    fixed_number: int | None = None,
    size: tuple[int, int] | None = None,
) -> ExportableDetector:
    """The exportable equivalent of a detector, which shares its parameters, in eval mode.

    Args:
        batched, fixed_number, size: see :class:`ExportableDetector`.

    Raises:
        InputError: for a detector with parts that have no equivalent here.
    """
    for name, part, kinds in _parts(detector):
        if type(part) not in kinds:
            known = " or ".join(kind.__name__ for kind in kinds)
            raise InputError(f"a detector whose {name} is a {type(part).__name__} cannot be exported: it is {known}")
    if isinstance(detector, RetinaNet) and detector.max_detections_per_image < 0:
        raise InputError("TEST.DETECTIONS_PER_IMAGE is below 0: detectron2's RetinaNet drops its last detection then")
    return _equivalent(detector)(detector, batched=batched, fixed_number=fixed_number, size=size).eval()


def _equivalent(detector: nn.Module) -> type[ExportableDetector]:
    if isinstance(detector, RetinaNet):
        return ExportableRetinaNet
    return ExportableCascadeRCNN if isinstance(detector.roi_heads, CascadeROIHeads) else ExportableRCNN


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
    parts += [("proposal generator", rpn, (RPN,)), ("ROI_HEADS", heads, _ROI_HEADS)]
    if type(rpn) is not RPN or type(heads) not in _ROI_HEADS:
        return parts
    parts += [
        ("anchor generator", rpn.anchor_generator, (DefaultAnchorGenerator,)),
        *(("box predictor", predictor, (FastRCNNOutputLayers,)) for predictor in _predictors(heads)),
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


def _predictors(heads: nn.Module) -> list[nn.Module]:
    return list(heads.box_predictor) if isinstance(heads, CascadeROIHeads) else [heads.box_predictor]
