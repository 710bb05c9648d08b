"""The exportable detectors give detectron2's own answers, and each of their steps is one of its or torchvision's."""

import copy
import functools

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN, build_model
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.modeling.roi_heads.mask_head import mask_rcnn_inference
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_iou, nms

from backbones import InputError
from projects_vil.export import make_exportable
from projects_vil.export.exportable.boxes import clip, decode, grid_anchors, has_area, per_anchor
from projects_vil.export.exportable.nms import best_of_row, best_without_overlap
from projects_vil.export.exportable.rcnn import of_class, pool
from projects_vil.export.report import eager_detections, example_image
from tests.projects_vil.helpers import lively_detector, small_config

BOTH = ("retinanet", "mask_rcnn")
SIZES = [(64, 64), (64, 97), (101, 64), (33, 47), (150, 203), (224, 129), (96, 320)]
VARIATIONS = {
    "class-agnostic boxes": ("mask_rcnn", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True"),
    "class-agnostic masks": ("mask_rcnn", "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"),
    "sigmoid": ("mask_rcnn", "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE", "True"),
    "no masks": ("mask_rcnn", "MODEL.MASK_ON", "False"),
    "one level": (
        *("mask_rcnn", "MODEL.ROI_HEADS.IN_FEATURES", "['p4']", "MODEL.RPN.IN_FEATURES", "['p4']"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16, 32]]"),
    ),
    "old pooling": ("mask_rcnn", "MODEL.ROI_BOX_HEAD.POOLER_TYPE", "ROIAlign"),
    "large boxes only": ("mask_rcnn", "MODEL.PROPOSAL_GENERATOR.MIN_SIZE", "12"),
    "all detections": ("mask_rcnn", "TEST.DETECTIONS_PER_IMAGE", "-1", "MODEL.RPN.POST_NMS_TOPK_TEST", "100"),
    "five detections": ("retinanet", "TEST.DETECTIONS_PER_IMAGE", "5"),
    "few candidates": ("retinanet", "MODEL.RETINANET.TOPK_CANDIDATES_TEST", "7"),
    "80 classes": ("retinanet", "MODEL.RETINANET.NUM_CLASSES", "80"),
    "80 classes, masks": ("mask_rcnn", "MODEL.ROI_HEADS.NUM_CLASSES", "80"),
    "three levels": (
        *("retinanet", "MODEL.RETINANET.IN_FEATURES", "['p3', 'p4', 'p5']"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", "[[16], [32], [64]]", "MODEL.ANCHOR_GENERATOR.OFFSET", "0.5"),
    ),
}


@functools.cache
def detector(name: str, *overrides: str) -> nn.Module:
    return lively_detector(small_config(name, *overrides))


def with_threshold(model: nn.Module, threshold: float) -> nn.Module:
    """A copy that reports what has a higher score."""
    model = copy.deepcopy(model)
    owner = model.roi_heads.box_predictor if isinstance(model, GeneralizedRCNN) else model
    assert hasattr(owner, "test_score_thresh")
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


# -- whole detectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_detector(name, size):
    image = example_image(*size, seed=sum(size))
    theirs = eager_detections(detector(name), image)
    assert len(theirs["scores"]) >= 10 and theirs["scores"].std() > 0.005
    assert set(theirs) == {"boxes", "scores", "classes"} | ({"masks"} if name == "mask_rcnn" else set())
    assert_equal(run(detector(name), image), theirs)


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("size", [(64, 97), (160, 128)])
def test_equals_other_detectors(variation, size):
    model, image = detector(*VARIATIONS[variation]), example_image(*size, seed=7)
    theirs = eager_detections(model, image)
    assert len(theirs["scores"]) >= 3 and ("masks" in theirs) == (
        VARIATIONS[variation][0] == "mask_rcnn" and variation != "no masks"
    )
    assert_equal(run(model, image), theirs)


def test_the_variations_reach_their_limits():
    """What the cases above are there for does happen in them."""
    image = example_image(160, 128, seed=7)
    found = {name: len(run(detector(*VARIATIONS[name]), image)["scores"]) for name in VARIATIONS}
    assert found["five detections"] == 5 and found["all detections"] > 100
    many = run(detector("retinanet", "TEST.DETECTIONS_PER_IMAGE", "1000"), image)
    assert len(many["scores"]) > 500 > 100 >= len(run(detector("retinanet"), image)["scores"])
    assert 0 < found["few candidates"] <= 7 * 5
    boxes = run(detector(*VARIATIONS["80 classes"]), image)
    assert len(set(boxes["classes"].tolist())) > 20
    # At 64 x 64 the upper levels have fewer scores than candidates are asked for, the lowest more.
    head = detector("retinanet")
    with torch.no_grad():
        numbers = [level[0, 0].numel() * 27 for level in head.backbone(torch.zeros(1, 3, 64, 64)).values()]
    assert head.num_classes == 3 and min(numbers) < head.test_topk_candidates < max(numbers)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("size", [(64, 97), (224, 129)])
def test_an_image_without_detections(name, size):
    image = example_image(*size)
    best = run(detector(name), image)["scores"][0].item()
    for threshold, at_least in ((best + 1e-4, 0), (best - 1e-4, 1)):
        model = with_threshold(detector(name), threshold)
        ours, theirs = run(model, image), eager_detections(model, image)
        assert min(1, len(theirs["scores"])) == at_least
        assert_equal(ours, theirs)
    nothing = run(with_threshold(detector(name), best + 1e-4), image)
    shapes = {key: tuple(value.shape) for key, value in nothing.items()}
    expected = {"boxes": (0, 4), "scores": (0,), "classes": (0,), "masks": (0, 1, 28, 28)}
    assert shapes == {key: expected[key] for key in shapes}


def test_no_proposal_at_all():
    model = copy.deepcopy(detector("mask_rcnn"))
    model.proposal_generator.min_box_size = 1e4
    image = example_image(64, 97)
    assert_equal(run(model, image), eager_detections(model, image))
    assert len(run(model, image)["boxes"]) == 0


@pytest.mark.parametrize("name", BOTH)
def test_a_uniform_image(name):
    for value in (0, 255):
        image = torch.full((3, 70, 90), value, dtype=torch.uint8)
        assert_equal(run(detector(name), image), eager_detections(detector(name), image))


@pytest.mark.parametrize("name", BOTH)
def test_what_comes_out(name):
    found = run(detector(name), example_image(72, 110))
    boxes, scores = found["boxes"], found["scores"]
    assert boxes.dtype == scores.dtype == torch.float32 and found["classes"].dtype == torch.int64
    assert (boxes >= 0).all() and (boxes <= torch.tensor([110, 72, 110, 72])).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (scores[1:] <= scores[:-1]).all() and 0 <= found["classes"].min() and found["classes"].max() <= 2
    if name == "mask_rcnn":
        assert found["masks"].shape == (len(scores), 1, 28, 28)
        assert 0 <= found["masks"].min() < 0.3 and 0.7 < found["masks"].max() <= 1


@pytest.mark.parametrize("name", BOTH)
def test_bytes_and_floats_are_the_same_image(name):
    image = example_image(60, 84)
    expected = run(detector(name), image)
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert_equal(run(detector(name), image.to(dtype)), expected, tolerance=1e-5)
    assert_equal(run(detector(name), image.float()), expected)


def test_parameters_are_shared_and_nothing_learns():
    model = detector("retinanet")
    exportable = make_exportable(model)
    assert not any(module.training for module in exportable.modules())
    assert {id(p) for p in exportable.parameters()} == {id(p) for p in model.parameters()}


# -- batches ---------------------------------------------------------------------------------------


def of_image(found: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    mine = found["image_index"] == index
    return {name: value[mine] for name, value in found.items() if name != "image_index"}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("number", [1, 3])
def test_a_batch_is_its_images_one_by_one(name, number):
    images = torch.stack([example_image(70, 101, seed=seed) for seed in range(number)])
    found = run(detector(name), images, batched=True)
    assert (found["scores"][1:] <= found["scores"][:-1]).all()
    assert found["image_index"].dtype == torch.int64
    for index, image in enumerate(images):
        theirs = eager_detections(detector(name), image)
        assert len(theirs["scores"]) >= 10
        assert_equal(of_image(found, index), theirs, tolerance=5e-5 if number > 1 else 0)
    assert len(found["scores"]) == sum(len(of_image(found, index)["scores"]) for index in range(number))


@pytest.mark.parametrize("name", BOTH)
def test_what_else_is_in_a_batch_does_not_matter(name):
    mine, black = example_image(70, 101, seed=1), torch.zeros(3, 70, 101, dtype=torch.uint8)
    neighbours = (mine, black, 255 - mine)
    found = [run(detector(name), torch.stack([other, mine]), batched=True) for other in neighbours]
    for other in found[1:]:
        assert_equal(of_image(other, 1), of_image(found[0], 1), tolerance=5e-5)
    assert not torch.equal(of_image(found[1], 0)["boxes"], of_image(found[1], 1)["boxes"])


@pytest.mark.parametrize("name", BOTH)
def test_a_batch_in_which_one_image_has_no_detection(name):
    images = torch.stack([example_image(70, 101, seed=seed) for seed in (1, 2, 3)])
    best = [eager_detections(detector(name), image)["scores"][0].item() for image in images]
    worst = best.index(min(best))
    model = with_threshold(detector(name), min(best) + 1e-5)
    found = run(model, images, batched=True)
    assert len(of_image(found, worst)["scores"]) == 0
    for index, image in enumerate(images):
        assert_equal(of_image(found, index), eager_detections(model, image), tolerance=5e-5)
        assert (len(of_image(found, index)["scores"]) > 0) == (index != worst)


def test_a_batch_without_any_detection():
    found = run(with_threshold(detector("mask_rcnn"), 1.1), torch.zeros(2, 3, 64, 70), batched=True)
    assert list(found) == ["boxes", "scores", "classes", "masks", "image_index"]
    assert {len(value) for value in found.values()} == {0}


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, overrides, expected",
    [
        (
            "mask_rcnn",
            ("MODEL.ROI_HEADS.NAME", "CascadeROIHeads", "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True"),
            "ROI_HEADS is a CascadeROIHeads",
        ),
        (
            "mask_rcnn",
            ("MODEL.ROI_HEADS.NAME", "Res5ROIHeads", "MODEL.ROI_HEADS.IN_FEATURES", "['p4']"),
            "ROI_HEADS is a Res5",
        ),
        ("mask_rcnn", ("MODEL.KEYPOINT_ON", "True"), "keypoint head is a KRCNNConvDeconvUpsampleHead"),
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


# -- steps -----------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def random_boxes(number: int, *, side: float = 100, seed: int = 0) -> Tensor:
    """(number, 4) within a square, from points to most of it."""
    corners = random(number, 2, 2, seed=seed).sort(dim=1).values * side
    return corners.flatten(1)


@pytest.mark.parametrize("channels", [1, 4, 3])
@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (6, 1)])
def test_predictions_per_anchor(channels, shape):
    predictions = random(2, 6 * channels, *shape)
    assert torch.equal(per_anchor(predictions, channels), permute_to_N_HWA_K(predictions, channels))


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_anchors(offset):
    generator = DefaultAnchorGenerator(
        sizes=[[16.0, 20.2], [32.0, 40.3], [64.0, 80.6]],
        aspect_ratios=[[0.5, 1.0, 2.0]],
        strides=[8, 16, 32],
        offset=offset,
    )
    maps = [torch.zeros(2, 3, *size) for size in ((9, 13), (5, 7), (1, 2))]
    for ours, theirs in zip(grid_anchors(generator, maps), generator(maps), strict=True):
        torch.testing.assert_close(ours, theirs.tensor, rtol=0, atol=0)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_decoding(weights):
    transform = Box2BoxTransform(weights=weights)
    deltas, anchors = (random(300, 4, seed=1) - 0.5) * 10 * torch.tensor(weights), random_boxes(300, seed=2)
    # Some sides grow beyond what the transform allows.
    assert ((deltas / torch.tensor(weights))[:, 2:] > transform.scale_clamp).any()
    ours = decode(transform, deltas, anchors)
    torch.testing.assert_close(ours, transform.apply_deltas(deltas, anchors), rtol=0, atol=0)
    # (P, K, 4) of (P, 1, 4)
    several = torch.stack([deltas, -deltas, 0 * deltas], dim=1)
    ours = decode(transform, several, anchors[:, None])
    assert ours.shape == (300, 3, 4)
    torch.testing.assert_close(ours.flatten(1), transform.apply_deltas(several.flatten(1), anchors), rtol=0, atol=0)


def test_decoding_of_half_precision_is_in_float32():
    transform, deltas = Box2BoxTransform(weights=(1.0, 1.0, 1.0, 1.0)), random(50, 4).half()
    ours = decode(transform, deltas, random_boxes(50, side=1333))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, transform.apply_deltas(deltas.float(), random_boxes(50, side=1333)), rtol=0, atol=0
    )


def test_clipping_and_areas():
    boxes = (random_boxes(400, side=200) - 50).round()
    boxes[0] = torch.tensor([-5.0, -7.0, -1.0, -1.0])
    theirs = Boxes(boxes.clone())
    theirs.clip((60, 90))
    assert torch.equal(clip(boxes, (60, 90)), theirs.tensor)
    for least in (0.0, 12.0):
        kept = has_area(theirs.tensor, least)
        assert torch.equal(kept, theirs.nonempty(threshold=least)) and 0 < kept.sum() < len(boxes)


@pytest.mark.parametrize("number, available", [(5, 20), (20, 20), (20, 7), (1000, 7), (3, 0)])
def test_best_of_row(number, available):
    scores = random(3, available)
    best, place = best_of_row(scores, number, filler=-1.0)
    assert best.shape == place.shape == (3, number)
    there = min(number, available)
    expected = scores.topk(there, dim=1)
    assert torch.equal(best[:, :there], expected.values) and torch.equal(place[:, :there], expected.indices)
    assert (best[:, there:] == -1).all() and (place[:, there:] == 0).all()


def pooler_of(*strides: int, output_size: int = 7, kind: str = "ROIAlignV2") -> ROIPooler:
    return ROIPooler(output_size, [1 / stride for stride in strides], sampling_ratio=0, pooler_type=kind)


def pyramid(*strides: int, side: int = 1024) -> list[Tensor]:
    return [random(2, 3, side // stride, side * 3 // 4 // stride, seed=stride) for stride in strides]


def detectron2_pooled(pooler: ROIPooler, maps: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
    """Its pooler takes the boxes image by image: in the order of ``boxes`` again."""
    rows = [(image == index).nonzero()[:, 0] for index in range(len(maps[0]))]
    pooled = pooler(maps, [Boxes(boxes[mine]) for mine in rows])
    return torch.empty_like(pooled).index_copy(0, torch.cat(rows), pooled)


def boxes_of_sides(*sides: float) -> tuple[Tensor, Tensor]:
    """A landscape and a portrait box of each side (root of the area), by turns in two images."""
    boxes = [(10.3, 20.7, 10.3 + side * wide, 20.7 + side / wide) for side in sides for wide in (1.25, 0.8)]
    return torch.tensor(boxes), torch.arange(len(boxes)) % 2


@pytest.mark.parametrize("kind", ["ROIAlignV2", "ROIAlign"])
@pytest.mark.parametrize("sides", [(12, 56, 100, 112, 200, 223.9, 224, 447, 448, 600), (130,), (30, 500)])
def test_pooling(kind, sides):
    strides = (4, 8, 16, 32)
    boxes, image = boxes_of_sides(*sides)
    pooler, maps = pooler_of(*strides, kind=kind), pyramid(*strides)
    levels = assign_boxes_to_levels([Boxes(boxes)], pooler.min_level, pooler.max_level, 224, 4)
    assert len(levels.unique()) == {10: 4, 1: 1, 2: 2}[len(sides)]
    theirs = detectron2_pooled(pooler, maps, boxes, image)
    assert theirs.std() > 0.01
    torch.testing.assert_close(pool(pooler, maps, boxes, image), theirs, rtol=0, atol=0)


def test_pooling_from_one_level_and_of_no_box():
    boxes, image = boxes_of_sides(12, 100, 600)
    pooler, maps = pooler_of(16, output_size=14), pyramid(16)
    ours = pool(pooler, maps, boxes, image)
    torch.testing.assert_close(ours, detectron2_pooled(pooler, maps, boxes, image), rtol=0, atol=0)
    assert pool(pooler_of(4, 8), pyramid(4, 8), boxes[:0], image[:0]).shape == (0, 3, 7, 7)


def test_pooling_of_half_precision():
    boxes, image = boxes_of_sides(12, 100, 600)
    maps = [level.half() for level in pyramid(4, 8, 16, 32)]
    ours = pool(pooler_of(4, 8, 16, 32), maps, boxes, image)
    theirs = detectron2_pooled(pooler_of(4, 8, 16, 32), [level.float() for level in maps], boxes, image)
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours, theirs.half(), rtol=0, atol=0)


@pytest.mark.parametrize("classes", [1, 5])
def test_the_mask_of_a_class(classes):
    logits, wanted = random(9, classes, 14, 28) - 0.5, torch.arange(9) % 5
    instances = Instances((50, 60), pred_classes=wanted)
    mask_rcnn_inference(logits, [instances])
    assert torch.equal(of_class(logits, wanted).sigmoid(), instances.pred_masks)
    assert of_class(logits[:0], wanted[:0]).shape == (0, 1, 14, 28)


# -- non-maximum suppression -----------------------------------------------------------------------


def one_by_one(boxes: Tensor, scores: Tensor, group: Tensor, image: Tensor, *, threshold: float, number: int) -> Tensor:
    """The definition: each group by itself, the best of each image, by score."""
    kept = []
    for index in image.unique():
        mine = [(group == one).nonzero()[:, 0] for one in group[image == index].unique()]
        best = torch.cat([rows[nms(boxes[rows], scores[rows], threshold)] for rows in mine])
        best = best[scores[best].argsort(descending=True)]
        kept.append(best if number < 0 else best[:number])
    kept = torch.cat(kept) if kept else torch.empty(0, dtype=torch.long)
    return kept[scores[kept].argsort(descending=True)]


def draw(number: int, *, groups: int, images: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randperm(number, generator=generator) / number
    image = torch.randint(0, images, (number,), generator=generator)
    group = image * groups + torch.randint(0, groups, (number,), generator=generator)
    return random_boxes(number, side=600, seed=seed) - 100, scores, group, image


@pytest.mark.parametrize("number", [-1, 0, 1, 30, 10_000])
@pytest.mark.parametrize("groups", [1, 2, 5, 80])
@pytest.mark.parametrize("images", [1, 3])
def test_suppression(number, groups, images):
    boxes, scores, group, image = draw(1500, groups=groups, images=images, seed=groups + images)
    ours = best_without_overlap(
        boxes,
        scores,
        group=group,
        groups_per_image=groups,
        threshold=0.3,
        number=number,
        **({"image": image, "num_images": images} if images > 1 else {}),
    )
    theirs = one_by_one(boxes, scores, group, image, threshold=0.3, number=number)
    assert ours.tolist() == theirs.tolist()
    assert (len(ours) == 0) == (number == 0) and len(ours) < len(boxes)
    if number < 0:
        assert ours.tolist() == batched_nms(boxes, scores, group, 0.3).tolist()


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("number", [-1, 0, 100])
@pytest.mark.parametrize("boxes", [0, 1, 2])
def test_suppression_of_hardly_any(boxes, number, with_image):
    image = {"image": torch.zeros(boxes, dtype=torch.long), "num_images": 2} if with_image else {}
    kept = best_without_overlap(
        torch.tensor([[0.0, 0, 5, 4], [50, 60, 70, 80]])[:boxes],
        torch.tensor([0.2, 0.7])[:boxes],
        group=torch.zeros(boxes, dtype=torch.long),
        groups_per_image=3,
        threshold=0.5,
        number=number,
        **image,
    )
    assert kept.dtype == torch.int64
    assert kept.tolist() == ([[], [0], [1, 0]][boxes] if number else [])


@pytest.mark.parametrize("shift", [0.0, -5000.0, 3000.0])
@pytest.mark.parametrize("groups", [2, 3, 80])
def test_groups_do_not_touch(shift, groups):
    """Boxes over all that there is, from border to border, are in each other's way only within a group."""
    boxes = torch.tensor([[0.0, 0, 1333, 800], [0, 0, 1333, 800], [1, 0, 1333, 800]]).repeat(groups, 1) + shift
    boxes = torch.cat([boxes, torch.tensor([[0.0, 0, 1, 1333], [1332, 0, 1333, 1333]]) + shift])
    group = torch.cat([torch.arange(groups).repeat_interleave(3), torch.tensor([0, groups - 1])])
    scores = 1 - torch.arange(len(boxes)) / len(boxes)
    kept = best_without_overlap(boxes, scores, group=group, groups_per_image=groups, threshold=1e-3, number=-1)
    slivers = [3 * groups, 3 * groups + 1]
    assert kept.tolist() == [*range(0, 3 * groups, 3), *(i for i in slivers if i in kept)]
    assert kept.tolist() == one_by_one(boxes, scores, group, group * 0, threshold=1e-3, number=-1).tolist()


def test_a_box_as_large_as_a_network_can_make_spares_the_others():
    """RetinaNet's boxes are suppressed before they are clipped: one far outside must not blur what is inside."""
    boxes, scores, group, image = draw(900, groups=80, images=1, seed=5)
    boxes[17] = torch.tensor([-12_000.0, -9_000, 13_000, 11_000])
    ours = best_without_overlap(boxes, scores, group=group, groups_per_image=80, threshold=0.5, number=-1)
    assert ours.tolist() == one_by_one(boxes, scores, group, image, threshold=0.5, number=-1).tolist()


def test_small_boxes_of_the_last_class_are_told_apart():
    """Two of 30 pixels, far from the origin, whose overlap is 3e-4 beside the threshold."""
    threshold = 0.5
    corner = torch.tensor([1290.0, 760.0]) + random(400, 2) * 10
    first = torch.cat([corner, corner + 30], dim=1)
    for margin, expected in ((3e-4, False), (-3e-4, True)):
        overlap = threshold + margin
        # Shifted by s, two squares of side a overlap by (a - s) / (a + s).
        shift = 30 * (1 - overlap) / (1 + overlap)
        second = first + torch.tensor([shift, 0, shift, 0])
        assert (box_iou(first, second).diagonal() - overlap).abs().max() < 1e-4
        for one, other in zip(first, second, strict=True):
            boxes = torch.stack([torch.tensor([0.0, 0, 1333, 800]), one, other])
            kept = best_without_overlap(
                boxes,
                torch.tensor([0.9, 0.8, 0.7]),
                group=torch.tensor([0, 79, 79]),
                groups_per_image=80,
                threshold=threshold,
                number=-1,
            )
            assert kept.tolist() == ([0, 1, 2] if expected else [0, 1])


def test_equal_scores_keep_their_order():
    boxes = torch.tensor([[0.0, 0, 9, 9], [20, 20, 29, 29], [0, 0, 9, 9], [40, 0, 49, 9]])
    kept = best_without_overlap(
        boxes,
        torch.full((4,), 0.5),
        group=torch.zeros(4, dtype=torch.long),
        groups_per_image=1,
        threshold=0.5,
        number=-1,
    )
    assert kept.tolist() == [0, 1, 3]
