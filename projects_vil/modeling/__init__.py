"""The backbones as detectron2 builds them, micro-batches, and test-time augmentation."""

from projects_vil.modeling.backbone import (
    LARGEST_BATCH,
    MAX_EXPORT_SIDE,
    MIN_EXPORT_SIDE,
    TransformerBackbone,
    amp_dtype,
    autocast_detector,
    build_on_meta,
    build_transformer_backbone,
    eval_dtype,
    export_sides,
    max_input_side,
    stage_channels,
    stage_names,
)
from projects_vil.modeling.micro_batches import MicroBatches
from projects_vil.modeling.roi_heads import AnyBatchPointRendMaskHead
from projects_vil.modeling.sync_free import use_sync_free_parts
from projects_vil.modeling.timm_backbone import TIMM_PREFIX, TimmBackbone, check_timm_name
from projects_vil.modeling.tta import add_tta
