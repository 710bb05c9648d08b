"""What has no exportable equivalent is refused by name."""

import pytest
from detectron2.modeling import build_model

from backbones import InputError
from projects_vil.export import make_exportable
from tests.projects_vil.helpers import small_config


@pytest.mark.parametrize(
    "name, overrides, expected",
    [
        (
            "mask_rcnn",
            ("MODEL.ROI_HEADS.NAME", "Res5ROIHeads", "MODEL.ROI_HEADS.IN_FEATURES", "['p4']"),
            "ROI_HEADS is a Res5",
        ),
        ("mask_rcnn", ("MODEL.KEYPOINT_ON", "True"), "keypoint head is a KRCNNConvDeconvUpsampleHead"),
        ("cascade_mask_rcnn", ("MODEL.KEYPOINT_ON", "True"), "keypoint head is a KRCNNConvDeconvUpsampleHead"),
        ("mask_rcnn", ("MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIPool"), "pooler's layer is a RoIPool"),
        ("mask_rcnn", ("MODEL.ROI_MASK_HEAD.POOLER_TYPE", "ROIPool"), "pooler's layer is a RoIPool"),
        ("mask_rcnn", ("MODEL.PROPOSAL_GENERATOR.NAME", "PrecomputedProposals"), "proposal generator is a NoneType"),
        (
            "mask_rcnn",
            (
                *("MODEL.PROPOSAL_GENERATOR.NAME", "RRPN", "MODEL.ANCHOR_GENERATOR.NAME", "RotatedAnchorGenerator"),
                *("MODEL.RPN.BBOX_REG_WEIGHTS", "(1.0, 1.0, 1.0, 1.0, 1.0)"),
            ),
            "proposal generator is a RRPN",
        ),
        ("mask_rcnn", ("MODEL.META_ARCHITECTURE", "ProposalNetwork"), "META_ARCHITECTURE is a ProposalNetwork"),
        ("mask_rcnn", ("MODEL.META_ARCHITECTURE", "PanopticFPN"), "META_ARCHITECTURE is a PanopticFPN"),
        ("semantic_fpn", (), "META_ARCHITECTURE is a SemanticSegmentor"),
    ],
)
def test_parts_without_an_equivalent_are_refused(name, overrides, expected):
    model = build_model(small_config(name, *overrides))
    with pytest.raises(InputError) as caught:
        make_exportable(model)
    message = str(caught.value)
    assert message.startswith(f"a detector whose {expected}") and "\n" not in message
