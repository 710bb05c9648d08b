"""The training settings that differ between models: their values, and where these are published.

"Detection README" is README.md of github.com/microsoft/VisionLongformerForObjectDetection, whose tables, with relative
bias and with absolute positions, have a column ``drop_path`` and end in "We use weight decay 0.05 for all experiments".
LIT's files are in github.com/ziplab/LIT, LITv2's in github.com/ziplab/LITv2.
"""

import functools
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from projects_vil import load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(
    str(path.relative_to(ROOT / "configs").with_suffix(""))
    for path in ROOT.glob("configs/**/*.yaml")
    if path.parent.name not in ("base", "demo")
)


_OFFSETS = [["*.patch_embed.offset.*", 0.01]]
# The tables "with relative positional bias" and "with absolute positional embedding".
_RPB = "Detection README, relative bias"
_ABSOLUTE = "Detection README, absolute positions, and relative bias of vil_small in RetinaNet"
# By key: a pattern of configs, the value, and the source. The first matching pattern applies. Other configs have values
# without a source.
VALUES = {
    "MODEL.TRANSFORMER.DROP_PATH": (
        ("*/*lit_ti*", 0.1, "LIT detection/mmdet/models/backbones/lit_ti.py, segmentation/mmseg/models/backbones"),
        ("*/*lit_s*", 0.2, "LIT detection/configs/lit/*_lit_s_fpn_1x_coco.py, segmentation/configs/lit/lit_s_fpn_*.py"),
        ("*/litv2_b*", 0.3, "LITv2 detection/configs/litv2/*_litv2_b_fpn_1x_coco*.py"),
        ("*/litv2_*", 0.2, "LITv2 detection/configs/litv2/*_litv2_[sm]_fpn_1x_coco*.py"),
        ("*/vil_tiny_1_1_3_1_rpb_1x", 0.0, "none: a small model for short runs from random weights"),
        ("*/partial_performer_small_1x", 0.05, _ABSOLUTE),
        ("mask_rcnn/vil_small_rpb_1x", 0.2, _RPB),
        ("*_small*_1x", 0.1, _ABSOLUTE),
        ("*_small*_3x_ms", 0.2, _RPB),
        ("*_tiny*_1x", 0.05, _RPB),
        ("*_tiny*_3x_ms", 0.1, _RPB),
        ("*_medium*_1x", 0.2, _RPB),
        ("*_medium*_3x_ms", 0.3, _RPB),
        ("*_base_*", 0.3, _RPB),
    ),
    "SOLVER.WEIGHT_DECAY": (
        ("*/*lit_*", 1e-4, "LIT sections 4.3 and 4.4; optimizer of {detection,segmentation}/configs/lit"),
        ("*/litv2_*", 1e-4, "LITv2 detection/configs/litv2: optimizer"),
        ("*/performer_from_partial_small_1x", 0.1, "ViL Table 10: the figure is the paper's alone"),
        ("*_rpb_*", 0.05, "Detection README: 0.05 for all experiments"),
        ("*/vil_*", 0.1, "ViL Table 10"),
        ("*", 0.05, "Detection README: 0.05 for all experiments"),
    ),
    "SOLVER.BASE_LR": (
        ("*mask_rcnn*lit_*", 2e-4, "LIT section 4.3; detection/configs/lit/mask_rcnn_lit_*_fpn_1x_coco.py"),
        ("mask_rcnn/litv2_*", 2e-4, "LITv2 detection/configs/litv2: optimizer"),
        ("*/lit_*", 1e-4, "LIT sections 4.3 and 4.4; optimizer of {detection,segmentation}/configs/lit"),
        ("*/vil_base_deep_*", 8e-5, "ViL Table 10, Base-D"),
        ("*", 1e-4, "ViL Table 10; SOLVER.BASE_LR in the Detection README's command"),
    ),
    "SOLVER.LR_MULTIPLIERS": (
        ("*/*lit_*", _OFFSETS, "LIT section 4.1: 1e-5 for offsets, 1e-3 otherwise"),
        ("*/litv2_*", _OFFSETS, "LITv2 classification/configs: OFFSET_LR_MULTI"),
        ("*", [], "the Detection repository's YAML files: 1.0 for every part"),
    ),
}


@functools.cache
def loaded(config: str) -> CfgNode:
    return load_config(ROOT / f"configs/{config}.yaml")


@pytest.mark.parametrize("key", VALUES)
def test_values_match_their_sources(key):
    used = set()
    for config in CONFIGS:
        pattern, value, source = next((row for row in VALUES[key] if fnmatchcase(config, row[0])), ("", None, ""))
        if not pattern:
            continue
        used.add(pattern)
        found = functools.reduce(getattr, key.split("."), loaded(config))
        assert found == value, f"configs/{config}.yaml: {key}; {source}"
    assert used == {pattern for pattern, *_ in VALUES[key]}
