"""The backbones as detectron2 builds them, and test-time augmentation."""

from projects_vil.modeling.backbone.fpn import build_retinanet_transformer_fpn_backbone, build_transformer_fpn_backbone
from projects_vil.modeling.backbone.transformer import TransformerBackbone, build_transformer_backbone
from projects_vil.modeling.batch_parts import BatchParts
from projects_vil.modeling.build import build_on_meta, stage_channels
from projects_vil.modeling.image_sizes import LARGEST_BATCH, LARGEST_SIDE, SMALLEST_SIDE, largest_side
from projects_vil.modeling.test_time_augmentation import add_tta, augmentation_sizes, longest_side

__all__ = [
    "LARGEST_BATCH",
    "LARGEST_SIDE",
    "SMALLEST_SIDE",
    "BatchParts",
    "TransformerBackbone",
    "add_tta",
    "augmentation_sizes",
    "build_on_meta",
    "build_retinanet_transformer_fpn_backbone",
    "build_transformer_backbone",
    "build_transformer_fpn_backbone",
    "largest_side",
    "longest_side",
    "stage_channels",
]
