"""The exportable detectors give exactly detectron2's detections, and each of their steps its result."""

import copy
import functools

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN, build_model
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.structures import Boxes
from torch import Tensor, nn
from torchvision.ops import batched_nms, nms

from backbones import ConfigError
from projects_vil.export import eager_detections, example_image, make_exportable
from projects_vil.export.detectors import (
    grouped_nms,
    pad_detections,
    pool,
    unpad_detections,
)
from tests.projects_vil.helpers import small_config, untrained_detector

ALL = ("retinanet", "mask_rcnn", "cascade_mask_rcnn")
_RCNN = ("mask_rcnn", "cascade_mask_rcnn")
_NUM_CLASSES = {"retinanet": "MODEL.RETINANET.NUM_CLASSES"} | dict.fromkeys(_RCNN, "MODEL.ROI_HEADS.NUM_CLASSES")
VARIATIONS = [
    *((name, (_NUM_CLASSES[name], "80")) for name in ALL),
    *((name, ("MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True")) for name in _RCNN),
    *((name, ("MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE", "True", "MODEL.MASK_ON", "False")) for name in _RCNN),
    ("retinanet", ("TEST.DETECTIONS_PER_IMAGE", "5")),
    ("retinanet", ("MODEL.RETINANET.TOPK_CANDIDATES_TEST", "7")),
    (
        "retinanet",
        (
            *("MODEL.RETINANET.IN_FEATURES", "['p3', 'p4', 'p5']"),
            *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16], [32], [64]]", "MODEL.ANCHOR_GENERATOR.OFFSET", "0.5"),
        ),
    ),
    ("mask_rcnn", ("MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True")),
    (
        "mask_rcnn",
        (
            *("MODEL.ROI_HEADS.IN_FEATURES", "['p4']", "MODEL.RPN.IN_FEATURES", "['p4']"),
            *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16, 32]]", "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlign"),
        ),
    ),
    ("mask_rcnn", ("MODEL.PROPOSAL_GENERATOR.MIN_SIZE", "12")),
    ("mask_rcnn", ("TEST.DETECTIONS_PER_IMAGE", "-1", "MODEL.RPN.POST_NMS_TOPK_TEST", "100")),
    (
        "cascade_mask_rcnn",
        (
            *("MODEL.ROI_BOX_CASCADE_HEAD.IOUS", "(0.5, 0.8)"),
            *("MODEL.ROI_BOX_CASCADE_HEAD.BBOX_REG_WEIGHTS", "((5.0, 6.0, 3.0, 4.0), (9.0, 8.0, 7.0, 6.0))"),
        ),
    ),
]


@functools.cache
def detector(name: str, *overrides: str) -> nn.Module:
    return untrained_detector(small_config(name, *overrides))


def with_threshold(model: nn.Module, threshold: float) -> nn.Module:
    """A copy that reports detections with a higher score."""
    model = copy.deepcopy(model)
    owner = model.roi_heads.box_predictor if isinstance(model, GeneralizedRCNN) else model
    owner = owner[-1] if isinstance(owner, nn.ModuleList) else owner
    owner.test_score_thresh = threshold
    return model


def run(model: nn.Module, image: Tensor, *, batched: bool = False) -> dict[str, Tensor]:
    exportable = make_exportable(model, batched=batched)
    with torch.no_grad():
        return dict(zip(exportable.output_names, exportable(image), strict=True))


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, tolerance: float = 0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def of_image(found: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    mine = found["image_index"] == index
    return {name: value[mine] for name, value in found.items() if name != "image_index"}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_boxes(number: int, *, side: float = 100, seed: int = 0) -> Tensor:
    """(number, 4) within a square, from points to most of it."""
    return random(number, 2, 2, seed=seed).sort(dim=1).values.flatten(1) * side


# -- detectors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [(64, 64), (33, 47), (150, 203), (224, 129)])
def test_equals_detectron2(name, size):
    image = example_image(*size, seed=sum(size))
    found, theirs = run(detector(name), image), eager_detections(detector(name), image)
    assert len(theirs["scores"]) >= 10 and theirs["scores"].std() > 0.005
    assert_equal(found, theirs)
    height, width = size
    boxes = found["boxes"]
    assert (boxes >= 0).all() and (boxes <= torch.tensor([width, height] * 2)).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all() and (found["scores"].diff() <= 0).all()
    assert ("masks" in found) == (name != "retinanet") and found["classes"].dtype == torch.int64
    uniform = torch.full((3, *size), 255, dtype=torch.uint8)
    assert_equal(run(detector(name), uniform), eager_detections(detector(name), uniform))
    assert_equal(run(detector(name), image.float()), found)


@pytest.mark.parametrize(("name", "overrides"), VARIATIONS)
def test_equals_other_detectors(name, overrides):
    model = detector(name, *overrides)
    for size in ((64, 97), (160, 128)):
        image = example_image(*size, seed=7)
        theirs = eager_detections(model, image)
        assert len(theirs["scores"]) >= 3
        assert_equal(run(model, image), theirs)
    assert ("masks" in theirs) == (name != "retinanet" and "MODEL.MASK_ON" not in overrides)
    if overrides[0] == "TEST.DETECTIONS_PER_IMAGE":
        assert len(theirs["scores"]) == 5 or len(theirs["scores"]) > 100


@pytest.mark.parametrize("name", ALL)
def test_images_without_detections(name):
    image = example_image(64, 97)
    best = run(detector(name), image)["scores"][0].item()
    for threshold, at_least in ((best + 1e-4, 0), (best - 1e-4, 1)):
        model = with_threshold(detector(name), threshold)
        found = run(model, image)
        assert min(1, len(found["scores"])) == at_least
        assert_equal(found, eager_detections(model, image))
    nothing = run(with_threshold(detector(name), 1.1), torch.stack([image] * 2), batched=True)
    shapes = {"boxes": (0, 4), "masks": (0, 1, 28, 28)}
    assert all(tuple(value.shape) == shapes.get(key, (0,)) for key, value in nothing.items())
    if name != "retinanet":
        model = copy.deepcopy(detector(name))
        model.proposal_generator.min_box_size = 1e4
        assert_equal(run(model, image), eager_detections(model, image))
        assert len(run(model, image)["boxes"]) == 0


@pytest.mark.parametrize("name", ALL)
def test_a_batch_equals_its_images_one_at_a_time(name):
    """One image has no detection at the threshold; float64, because batched convolutions round differently."""
    images = torch.stack([example_image(70, 101, seed=seed) for seed in (1, 2, 3)])
    model = copy.deepcopy(detector(name)).double()
    best = [run(model, image)["scores"][0].item() for image in images]
    model = with_threshold(model, min(best) + 1e-5)
    found = run(model, images, batched=True)
    assert (found["scores"].diff() <= 0).all() and found["image_index"].dtype == torch.int64
    for index, image in enumerate(images):
        assert_equal(of_image(found, index), run(model, image), tolerance=1e-4)
        assert (len(of_image(found, index)["scores"]) > 0) == (best[index] > min(best))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_head_of_a_cascade_counts(stage):
    model, image = detector("cascade_mask_rcnn"), example_image(96, 130, seed=3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.roi_heads.box_predictor[stage].cls_score.bias += torch.arange(4.0)
        other.roi_heads.box_predictor[stage].bbox_pred.bias += 0.3
    before, after = run(model, image), run(other, image)
    assert before["scores"][:5].tolist() != after["scores"][:5].tolist()
    assert before["boxes"][:5].tolist() != after["boxes"][:5].tolist()
    assert_equal(after, eager_detections(other, image))


def test_parameters_are_shared_and_in_eval_mode():
    model = detector("mask_rcnn")
    exportable = make_exportable(model)
    assert not any(module.training for module in exportable.modules())
    assert {id(p) for p in exportable.parameters()} == {id(p) for p in model.parameters()}
    assert all(name.startswith("detector.") for name in exportable.state_dict())


_RRPN = ("MODEL.PROPOSAL_GENERATOR.NAME", "RRPN", "MODEL.ANCHOR_GENERATOR.NAME", "RotatedAnchorGenerator")
_RRPN += ("MODEL.RPN.BBOX_REG_WEIGHTS", "(1.0, 1.0, 1.0, 1.0, 1.0)")


@pytest.mark.parametrize(
    ("name", "overrides", "part"),
    [
        ("mask_rcnn", ("MODEL.ROI_HEADS.NAME", "Res5ROIHeads", "MODEL.ROI_HEADS.IN_FEATURES", "['p4']"), "Res5"),
        ("cascade_mask_rcnn", ("MODEL.KEYPOINT_ON", "True"), "KRCNNConvDeconvUpsampleHead"),
        ("mask_rcnn", ("MODEL.ROI_MASK_HEAD.POOLER_TYPE", "ROIPool"), "RoIPool"),
        ("mask_rcnn", _RRPN, "RRPN"),
        ("mask_rcnn", ("MODEL.META_ARCHITECTURE", "PanopticFPN"), "PanopticFPN"),
        ("semantic_fpn", (), "SemanticSegmentor"),
        ("retinanet", ("TEST.DETECTIONS_PER_IMAGE", "-1"), "TEST.DETECTIONS_PER_IMAGE"),
    ],
)
def test_parts_without_an_equivalent_are_refused(name, overrides, part):
    with pytest.raises(ConfigError, match=part):
        make_exportable(build_model(small_config(name, *overrides)))


# -- steps -----------------------------------------------------------------------------------------


def reference_suppression(
    boxes: Tensor, scores: Tensor, group: Tensor, image: Tensor, *, threshold: float, number: int
) -> Tensor:
    """Suppress in each group on its own, then keep the best of each image by score: the reference definition."""
    kept = []
    for index in image.unique():
        mine = [(group == one).nonzero()[:, 0] for one in group[image == index].unique()]
        best = torch.cat([rows[nms(boxes[rows], scores[rows], threshold)] for rows in mine])
        best = best[scores[best].argsort(descending=True)]
        kept.append(best if number < 0 else best[:number])
    kept = torch.cat(kept)
    return kept[scores[kept].argsort(descending=True)]


@pytest.mark.parametrize(
    ("number", "groups", "images"), [(-1, 80, 1), (-1, 5, 3), (30, 80, 3), (30, 2, 1), (1, 5, 1), (0, 2, 3)]
)
def test_suppression(number, groups, images):
    """One box is far outside, as RetinaNet's may be before they are clipped: it must not blur the others."""
    generator = torch.Generator().manual_seed(groups)
    scores = torch.randperm(900, generator=generator) / 900
    image = torch.randint(0, images, (900,), generator=generator)
    group = image * groups + torch.randint(0, groups, (900,), generator=generator)
    boxes = random_boxes(900, side=600, seed=groups) - 100
    boxes[17] = torch.tensor([-12_000.0, -9_000, 13_000, 11_000])
    several = {"image": image, "num_images": images} if images > 1 else {}
    ours = grouped_nms(boxes, scores, group=group, groups_per_image=groups, threshold=0.3, number=number, **several)
    theirs = reference_suppression(boxes, scores, group, image, threshold=0.3, number=number)
    assert ours.tolist() == theirs.tolist() and len(ours) < len(boxes)
    if number < 0 and groups == 5:
        assert ours.tolist() == batched_nms(boxes, scores, group, 0.3).tolist()


@pytest.mark.parametrize(("groups", "shift"), [(2, 0.0), (80, -5000.0), (80, 3000.0)])
def test_groups_do_not_touch(groups, shift):
    """Boxes that fill the image suppress others only within a group."""
    boxes = torch.tensor([[0.0, 0, 1333, 800], [0, 0, 1333, 800], [1, 0, 1333, 800]]).repeat(groups, 1) + shift
    group = torch.arange(groups).repeat_interleave(3)
    scores = 1 - torch.arange(len(boxes)) / len(boxes)
    kept = grouped_nms(boxes, scores, group=group, groups_per_image=groups, threshold=1e-3, number=-1)
    assert kept.tolist() == [*range(0, 3 * groups, 3)]


@pytest.mark.parametrize(("margin", "is_kept"), [(3e-4, False), (-3e-4, True)])
def test_small_boxes_of_the_last_class(margin, is_kept):
    """Two of 30 pixels, far from the top left corner, whose IoU is 3e-4 from the threshold."""
    overlap = 0.5 + margin
    # Shifted by s, two squares of side a overlap by (a - s) / (a + s).
    shift = torch.tensor([30 * (1 - overlap) / (1 + overlap), 0]).repeat(2)
    for corner in torch.tensor([1290.0, 760.0]) + random(40, 2) * 10:
        one = torch.cat([corner, corner + 30])
        kept = grouped_nms(
            torch.stack([torch.tensor([0.0, 0, 1333, 800]), one, one + shift]),
            torch.tensor([0.9, 0.8, 0.7]),
            group=torch.tensor([0, 79, 79]),
            groups_per_image=80,
            threshold=0.5,
            number=-1,
        )
        assert kept.tolist() == ([0, 1, 2] if is_kept else [0, 1])


def test_padded_detections_and_back():
    """Four images have three detections, none, one, and two; the highest score comes first."""
    found = {
        "boxes": torch.arange(24.0).view(6, 4),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.5, 0.4, 0.1]),
        "image_index": torch.tensor([3, 0, 0, 2, 3, 0]),
    }
    rows = pad_detections(found, number=3, num_images=4)
    assert list(rows) == ["boxes", "scores", "count"] and rows["boxes"].shape == (4, 3, 4)
    assert rows["count"].tolist() == [3, 0, 1, 2] and rows["count"].dtype == torch.int64
    expected = torch.tensor([[0.8, 0.7, 0.1], [0, 0, 0], [0.5, 0, 0], [0.9, 0.4, 0]])
    assert torch.equal(rows["scores"], expected)
    assert rows["boxes"][3].tolist() == [[0, 1, 2, 3], [16, 17, 18, 19], [0] * 4]
    assert_equal(unpad_detections(rows), found)
    nothing = pad_detections({name: value[:0] for name, value in found.items()}, number=2, num_images=3)
    assert nothing["count"].tolist() == [0, 0, 0] and not nothing["boxes"].any()
    assert {len(value) for value in unpad_detections(nothing).values()} == {0}


@pytest.mark.parametrize(
    ("sides", "strides", "pooler_type", "dtype"),
    [
        ((12, 56, 100, 112, 200, 223.9, 224, 447, 448, 600), (4, 8, 16, 32), "ROIAlignV2", torch.float32),
        ((12, 100, 600), (4, 8, 16, 32), "ROIAlign", torch.float32),
        ((12, 100, 600), (4, 8, 16, 32), "ROIAlignV2", torch.float16),
        ((130, 30), (16,), "ROIAlignV2", torch.float32),
    ],
)
def test_pooling(sides, strides, pooler_type, dtype):
    """Boxes in two images: a landscape and a portrait one of each side (root of the area)."""
    boxes = torch.tensor([(10.3, 20.7, 10.3 + a * wide, 20.7 + a / wide) for a in sides for wide in (1.25, 0.8)])
    image = torch.arange(len(boxes)) % 2
    pooler = ROIPooler(7, [1 / stride for stride in strides], sampling_ratio=0, pooler_type=pooler_type)
    features = [random(2, 3, 1024 // stride, 768 // stride, seed=stride).to(dtype) for stride in strides]
    if len(sides) == 10:
        levels = assign_boxes_to_levels([Boxes(boxes)], pooler.min_level, pooler.max_level, 224, 4)
        assert len(levels.unique()) == 4
    # detectron2 takes the boxes image by image.
    rows = [(image == index).nonzero()[:, 0] for index in (0, 1)]
    theirs = pooler([feature.float() for feature in features], [Boxes(boxes[mine]) for mine in rows])
    theirs = torch.empty_like(theirs).index_copy(0, torch.cat(rows), theirs).to(dtype)
    ours = pool(pooler, features, boxes, image)
    assert ours.dtype == dtype and theirs.float().std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert pool(pooler, features, boxes[:0], image[:0]).shape == (0, 3, 7, 7)
