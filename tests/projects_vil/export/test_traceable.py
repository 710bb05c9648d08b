"""The exportable detectors give the detections of detectron2."""

import copy

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN, build_model
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_iou

from backbones import ConfigError
from projects_vil.export import eager_detections, example_image, make_exportable
from projects_vil.export.formats import OPSET, import_openvino, openvino_core
from projects_vil.export.traceable import grouped_nms, pool
from tests.projects_vil.export.exporting import demo_detector, skip_without
from tests.projects_vil.helpers import assert_same_detections, small_config
from tests.selection import slow_except
from tests.tolerances import FLOAT32

ALL = ("retinanet", "mask_rcnn", "cascade_mask_rcnn")
FIELDS = {"boxes": "pred_boxes", "scores": "scores", "classes": "pred_classes", "masks": "pred_masks"}
# Detectors with config overrides.
VARIATIONS = [
    "retinanet MODEL.RETINANET.NUM_CLASSES 80 TEST.DETECTIONS_PER_IMAGE 5",
    "retinanet MODEL.RETINANET.IN_FEATURES ['p3','p4','p5'] MODEL.RETINANET.TOPK_CANDIDATES_TEST 7 "
    "MODEL.ANCHOR_GENERATOR.SIZES [[16],[32],[64]] MODEL.ANCHOR_GENERATOR.OFFSET 0.5",
    "mask_rcnn MODEL.ROI_HEADS.NUM_CLASSES 80 MODEL.PROPOSAL_GENERATOR.MIN_SIZE 12",
    "mask_rcnn MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK True MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG True",
    "mask_rcnn MODEL.ROI_HEADS.IN_FEATURES ['p4'] MODEL.RPN.IN_FEATURES ['p4'] MODEL.ANCHOR_GENERATOR.SIZES [[16,32]] "
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE ROIAlign TEST.DETECTIONS_PER_IMAGE -1 MODEL.RPN.POST_NMS_TOPK_TEST 100",
    "cascade_mask_rcnn MODEL.ROI_HEADS.NUM_CLASSES 80 MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK True",
    "cascade_mask_rcnn MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE True MODEL.MASK_ON False MODEL.ROI_BOX_CASCADE_HEAD.IOUS "
    "(0.5,0.8) MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS ((5.0,6.0,3.0,4.0),(9.0,8.0,7.0,6.0))",
]


def with_threshold(model: nn.Module, threshold: float) -> nn.Module:
    """Return a copy with another score threshold."""
    model = copy.deepcopy(model)
    owner = model.roi_heads.box_predictor if isinstance(model, GeneralizedRCNN) else model
    owner = owner[-1] if isinstance(owner, nn.ModuleList) else owner
    owner.test_score_thresh = threshold
    return model


def run(model: nn.Module, image: Tensor, *, batched: bool = False) -> dict[str, Tensor]:
    exportable = make_exportable(model, batched=batched)
    with torch.no_grad():
        return dict(zip(exportable.output_names, exportable(image), strict=True))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert {key: x.dtype for key, x in ours.items()} == {key: x.dtype for key, x in theirs.items()}
    found, expected = (
        Instances((0, 0), **{FIELDS[key]: Boxes(x) if key == "boxes" else x for key, x in outputs.items()})
        for outputs in (ours, theirs)
    )
    if len(found) + len(expected):
        assert_same_detections(found, expected)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# -- detectors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [(33, 47), (150, 203)])
def test_equals_detectron2(name, size):
    image = example_image(*size, seed=sum(size))
    found, theirs = run(demo_detector(name), image), eager_detections(demo_detector(name), image)
    assert len(theirs["scores"]) >= 10 and theirs["scores"].std() > 0.005
    assert_equal(found, theirs)
    assert_equal(run(demo_detector(name), image.float()), found)
    height, width = size
    boxes = found["boxes"]
    assert (boxes >= 0).all() and (boxes <= torch.tensor([width, height] * 2)).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all() and (found["scores"].diff() <= 0).all()
    assert ("masks" in found) == (name != "retinanet") and found["classes"].dtype == torch.int64


@pytest.mark.parametrize("variation", VARIATIONS)
def test_equals_other_detectors(variation):
    model, image = demo_detector(*variation.split()), example_image(160, 128, seed=7)
    theirs = eager_detections(model, image)
    number = len(theirs["scores"])
    assert number == 5 or number > 100 if "TEST.DETECTIONS_PER_IMAGE" in variation else number >= 3
    assert_equal(run(model, image), theirs)


@pytest.mark.parametrize("name", slow_except(ALL, ["mask_rcnn"]))
def test_a_batch_equals_its_images_one_at_a_time(name):
    """One image has no detection. The test uses float64, because batched convolutions round differently."""
    images = torch.stack([example_image(70, 101, seed=seed) for seed in (1, 2, 3)])
    model = copy.deepcopy(demo_detector(name)).double()
    best = [run(model, image)["scores"][0].item() for image in images]
    model = with_threshold(model, min(best) + 1e-5)
    found = run(model, images, batched=True)
    image_index = found.pop("image_index")
    assert (found["scores"].diff() <= 0).all() and image_index.dtype == torch.int64
    for index, image in enumerate(images):
        one = {key: value[image_index == index] for key, value in found.items()}
        assert_equal(one, run(model, image))
        assert (len(one["scores"]) > 0) == (best[index] > min(best))


@pytest.mark.parametrize(
    ("variation", "part"),
    [
        ("mask_rcnn MODEL.ROI_HEADS.NAME Res5ROIHeads MODEL.ROI_HEADS.IN_FEATURES ['p4']", "Res5"),
        ("cascade_mask_rcnn MODEL.KEYPOINT_ON True", "KRCNNConvDeconvUpsampleHead"),
        (
            "mask_rcnn MODEL.PROPOSAL_GENERATOR.NAME RRPN MODEL.ANCHOR_GENERATOR.NAME RotatedAnchorGenerator "
            "MODEL.RPN.BBOX_REG_WEIGHTS (1.0,1.0,1.0,1.0,1.0)",
            "RRPN",
        ),
        ("mask_rcnn MODEL.META_ARCHITECTURE PanopticFPN", "PanopticFPN"),
    ],
)
def test_parts_that_cannot_be_exported(variation, part):
    with pytest.raises(ConfigError, match=part):
        make_exportable(build_model(small_config(*variation.split())))


# -- steps -----------------------------------------------------------------------------------------


def test_suppression():
    """Groups are separate. A box far outside, as RetinaNet predicts before clipping, must not cost precision."""
    generator = torch.Generator().manual_seed(80)
    scores = torch.randperm(1200, generator=generator) / 1200
    group = torch.randint(0, 3 * 80, (1200,), generator=generator)
    boxes = random(1200, 2, 2, seed=80).sort(dim=1).values.flatten(1) * 600 - 100
    boxes[17] = torch.tensor([-12_000.0, -9_000, 13_000, 11_000])
    ours = grouped_nms(boxes, scores, group, 80, 0.3)
    # With this many boxes, torchvision loops over the groups.
    assert ours.tolist() == batched_nms(boxes, scores, group, 0.3).tolist() and len(ours) < len(boxes)


class Suppression(nn.Module):
    threshold = 0.5

    def forward(self, boxes: Tensor, scores: Tensor, group: Tensor) -> Tensor:
        return grouped_nms(boxes, scores, group, 3, self.threshold)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7])
@pytest.mark.parametrize("file_format", ["openvino", "onnx"])
def test_suppression_at_the_threshold(tmp_path, file_format, threshold):
    """Scores are equal, and IoUs equal the threshold, which float32 rounds up or down."""
    skip_without(file_format)
    corners, sides = random(300, 2).mul(20).floor(), random(300, 2, seed=1).mul(12).floor() + 2
    boxes = torch.cat([corners, corners + sides], 1)
    values = boxes, random(300).mul(8).ceil() / 8, random(300, seed=2).mul(3).long()
    module, path = Suppression(), tmp_path / "model.onnx"
    module.threshold = threshold
    if file_format == "openvino":
        model = openvino_core().compile_model(import_openvino().convert_model(module, example_input=values), "CPU")
        (found,) = model([value.numpy() for value in values]).values()
    else:
        torch.onnx.export(module, values, path, dynamo=True, opset_version=OPSET, verbose=False)
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        (found,) = session.run(None, dict(zip(("boxes", "scores", "group"), map(Tensor.numpy, values), strict=True)))
    assert ((box_iou(boxes, boxes) - threshold).abs() < 1e-6).any()
    assert found.tolist() == batched_nms(*values, threshold).tolist() == module(*values).tolist()


@pytest.mark.parametrize(("pooler_type", "dtype"), [("ROIAlignV2", torch.float32), ("ROIAlign", torch.float16)])
def test_pooling(pooler_type, dtype):
    """Boxes in two images: one landscape and one portrait box of each area, on all levels."""
    sides = (12, 56, 100, 112, 200, 223.9, 224, 447, 448, 600)
    boxes = torch.tensor([(10.3, 20.7, 10.3 + a * wide, 20.7 + a / wide) for a in sides for wide in (1.25, 0.8)])
    image = torch.arange(len(boxes)) % 2
    strides = (4, 8, 16, 32)
    pooler = ROIPooler(7, [1 / stride for stride in strides], sampling_ratio=0, pooler_type=pooler_type)
    features = [random(2, 3, 1024 // stride, 768 // stride, seed=stride).to(dtype) for stride in strides]
    assert len(assign_boxes_to_levels([Boxes(boxes)], pooler.min_level, pooler.max_level, 224, 4).unique()) == 4
    # detectron2 takes a list of boxes per image.
    rows = [(image == index).nonzero()[:, 0] for index in (0, 1)]
    theirs = pooler([feature.float() for feature in features], [Boxes(boxes[mine]) for mine in rows])
    theirs = torch.empty_like(theirs).index_copy(0, torch.cat(rows), theirs).to(dtype)
    ours = pool(pooler, features, boxes, image)
    assert ours.dtype == dtype and theirs.float().std() > 0.01
    torch.testing.assert_close(ours, theirs, **FLOAT32)
