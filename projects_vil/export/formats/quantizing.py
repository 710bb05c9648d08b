"""Which layers become int8: what the quantisers of all formats are told."""

import re

# Where an error of rounding becomes one of a place or of a score, at hardly any time: layers that predict, and the
# offsets of deformable token merging. RetinaNet's scores are not among them: with 80 classes that layer is large.
FLOAT_LAYERS = (
    "patch_embed.offset",
    "head.bbox_pred",
    "rpn_head.objectness_logits",
    "rpn_head.anchor_deltas",
    "box_predictor.cls_score",
    "box_predictor.bbox_pred",
    "mask_head.predictor",
)
# What every quantised file says of itself.
FLOAT_PARTS = (
    "all but convolutions and linear layers: normalisation of images, layer norms, products and softmax of attention",
    "anchors, decoding of boxes, scores, non-maximum suppression, RoIAlign",
    "the deconvolution of masks; in OpenVINO depthwise convolutions too",
    *FLOAT_LAYERS,
)


def stays_float(name: str) -> bool:
    """Whether a parameter's or an operation's name, with the path of its module, is of ``FLOAT_LAYERS``."""
    # A cascade's predictors are numbered.
    name = re.sub(r"box_predictor\.\d+\.", "box_predictor.", name)
    return any(layer in name for layer in FLOAT_LAYERS)
