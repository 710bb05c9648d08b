"""Test large-scale jitter and copy-paste: masks and boxes match the pixels, and invalid combinations of keys fail.

Each object is a rectangle with its own color, so the pixels show the masks.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import transforms as T
from detectron2.structures import BoxMode, Instances
from pycocotools import mask as mask_util
from torchvision.ops import masks_to_boxes

from projects_vil.data import Mapper
from projects_vil.data.augmentation import MIN_VISIBLE_PIXELS, CopyPaste, paste
from projects_vil.engine.checks import check_values
from tests.projects_vil.data.custom_dataset import mapped
from tests.projects_vil.helpers import message, small_config

RED, GREEN, BLUE, YELLOW, CYAN = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)


@dataclass(frozen=True)
class Rectangle:
    """A rectangle with rows ``top`` to ``bottom`` - 1 and columns ``left`` to ``right`` - 1."""

    top: int
    bottom: int
    left: int
    right: int
    color: tuple[int, int, int] = RED
    category: int = 0
    rle: bool = False
    crowd: bool = False


def write_record(folder: Path, name: str, size: tuple[int, int], *objects: Rectangle) -> dict:
    """Write a black PNG file of (height, width) with objects, and return its record.

    Later objects cover earlier objects.
    """
    image, annotations, path = np.zeros((*size, 3), np.uint8), [], str(folder / f"{name}.png")
    for one in objects:
        image[one.top : one.bottom, one.left : one.right] = one.color
        left, top, right, bottom = map(float, (one.left, one.top, one.right, one.bottom))
        polygons = [[left, top, right, top, right, bottom, left, bottom]]
        box = {"bbox": [left, top, right, bottom], "bbox_mode": BoxMode.XYXY_ABS, "category_id": one.category}
        mask = mask_util.frPyObjects(polygons, *size)[0] if one.rle else polygons
        annotations.append(box | {"iscrowd": int(one.crowd), "segmentation": mask})
    cv2.imwrite(path, image[..., ::-1])
    return {"file_name": path, "height": size[0], "width": size[1], "image_id": name, "annotations": annotations}


def pixels_of(image: torch.Tensor, color: tuple[int, int, int]) -> torch.Tensor:
    """Return the pixels (H, W) bool of an image (3, H, W) whose channels all differ from a color by less than 128."""
    return ((image.int() - torch.tensor(color)[:, None, None]).abs() < 128).all(dim=0)


def boxes_of(masks: torch.Tensor) -> list[list[float]]:
    """Return left, top, right and bottom of non-empty masks (N, H, W)."""
    return (masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])).tolist()


LSJ = ("INPUT.AUGMENTATION", "lsj")
STRONG = ("INPUT.AUGMENTATION", "lsj_copy_paste")
COLORS = (RED, GREEN, BLUE)
OBJECTS = (Rectangle(3, 11, 5, 26, RED), Rectangle(14, 29, 30, 43, GREEN, 1), Rectangle(20, 30, 2, 10, BLUE, 2))


def assert_visible(instances: Instances, image: torch.Tensor) -> int:
    """Check the masks and boxes of ``OBJECTS`` by an image (3, H, W), and return the number of visible objects."""
    visible = [pixels_of(image, color) for color in COLORS]
    # Objects outside the crop are removed.
    kept = [number for number, pixels in enumerate(visible) if pixels.any()]
    assert instances.gt_classes.tolist() == kept
    assert torch.equal(instances.gt_masks.tensor, torch.stack([visible[number] for number in kept]))
    assert instances.gt_boxes.tensor.tolist() == boxes_of(instances.gt_masks.tensor)
    return len(kept)


def lsj(factor: float, *overrides: str, size: int = 47, detector: str = "mask_rcnn") -> Mapper:
    """Return a mapper with large-scale jitter at a fixed scale."""
    keys = ("INPUT.LSJ.SIZE", str(size), "INPUT.LSJ.SCALE", f"({factor}, {factor})")
    return Mapper(small_config(detector, *LSJ, *keys, *overrides), is_train=True)


# -- large-scale jitter ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(31, 47), (47, 31)])
def test_images_match_detectron2s_augmentations(tmp_path, size):
    record = write_record(tmp_path, "a", size, Rectangle(3, 11, 5, 26))
    theirs = T.AugmentationList([T.ResizeScale(0.1, 2.0, 64, 64), T.FixedSizeCrop((64, 64))])
    cfg = small_config("mask_rcnn", *LSJ, "INPUT.LSJ.SIZE", "64", "INPUT.RANDOM_FLIP", "none")
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[3:11, 5:26] = RED
    for seed in range(5):
        image = mapped(Mapper(cfg, is_train=True), record, seed=seed)["image"]
        np.random.seed(seed)
        inputs = T.AugInput(pixels)
        theirs(inputs)
        assert image.shape == (3, 64, 64) and (inputs.image == image.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize(
    "factor, rle, flip", [(1, False, "horizontal"), (1, True, "none"), (2, False, "none"), (2, True, "horizontal")]
)
def test_masks_are_the_visible_pixels_and_boxes_enclose_them(tmp_path, factor, rle, flip):
    objects = [replace(one, rle=rle) for one in OBJECTS]
    record = write_record(tmp_path, "a", (31, 47), *objects)
    numbers = set()
    for seed in range(8):
        sample = mapped(lsj(factor, "INPUT.RANDOM_FLIP", flip), record, seed=seed)
        instances = sample["instances"]
        assert sample["image"].shape == (3, 47, 47) and instances.image_size == (47, 47)
        numbers.add(assert_visible(instances, sample["image"]))
    assert numbers == {3} if factor == 1 else min(numbers) < 3


@pytest.mark.parametrize("factor", [0.53, 1.37, 2])
def test_boxes_are_the_same_with_and_without_masks(tmp_path, factor):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    for seed in range(6):
        with_masks = mapped(lsj(factor, detector="mask_rcnn"), record, seed=seed)["instances"]
        without = mapped(lsj(factor, detector="retinanet"), record, seed=seed)["instances"]
        assert without.gt_classes.tolist() == with_masks.gt_classes.tolist() and not without.has("gt_masks")
        torch.testing.assert_close(without.gt_boxes.tensor, with_masks.gt_boxes.tensor, atol=1e-2, rtol=0)


def test_the_box_of_a_cropped_triangle_shrinks(tmp_path):
    """The crop removes the base of the triangle, so its visible part is lower than its clipped box."""
    record = write_record(tmp_path, "a", (60, 60), Rectangle(5, 55, 4, 56))
    record["annotations"][0]["segmentation"] = [[4.0, 30.0, 56.0, 5.0, 56.0, 55.0]]
    num_shrunk = 0
    for seed in range(8):
        instances = mapped(lsj(1.9, "INPUT.RANDOM_FLIP", "none", size=60), record, seed=seed)["instances"]
        [box], [visible] = instances.gt_boxes.tensor, instances.gt_masks.get_bounding_boxes().tensor
        assert (box - visible).abs().max() <= 1
        num_shrunk += int(visible[3] - visible[1] < 58)
    assert num_shrunk


def test_narrow_images_and_images_without_objects(tmp_path):
    record = write_record(tmp_path, "a", (2, 300), Rectangle(0, 2, 5, 200))
    sample = mapped(lsj(0.1, size=96), record)
    assert sample["image"].shape == (3, 96, 96) and (sample["image"][:, 1:] == 128).all()
    crowd = write_record(tmp_path, "b", (31, 47), Rectangle(3, 11, 5, 26, rle=True, crowd=True))
    for record in (crowd, crowd | {"annotations": []}):
        assert len(mapped(lsj(1), record)["instances"]) == 0


def test_crops_of_masks_need_no_shapely(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    crop = ["INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "absolute", "INPUT.CROP.SIZE", "[20, 30]"]
    cfg = small_config("mask_rcnn", *crop, "INPUT.MIN_SIZE_TRAIN", "(20,)")
    instances = mapped(Mapper(cfg, is_train=True), record)["instances"]
    assert len(instances) and instances.gt_boxes.tensor.tolist() == boxes_of(instances.gt_masks.tensor)


# -- colors ----------------------------------------------------------------------------------------


def test_colors_change_alike_in_both_orders_of_channels(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    keys = ["INPUT.PHOTOMETRIC_DISTORTION", "True", "INPUT.FORMAT"]
    rgb, bgr = (Mapper(small_config("retinanet", *keys, order), is_train=True) for order in ("RGB", "BGR"))
    for seed in range(6):
        assert torch.equal(mapped(rgb, record, seed=seed)["image"], mapped(bgr, record, seed=seed)["image"].flip(0))


def test_strong_changes_colors_but_not_the_padding(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    keys = ["INPUT.LSJ.SIZE", "47", "INPUT.LSJ.SCALE", "(1.0, 1.0)", "INPUT.RANDOM_FLIP", "none"]
    for name, num_colors in (("lsj", 1), ("lsj_copy_paste", 4)):
        mapper = Mapper(small_config("mask_rcnn", "INPUT.AUGMENTATION", name, *keys), is_train=True)
        samples = [mapped(mapper, record, seed=seed) for seed in range(6)]
        images = [sample["image"] for sample in samples]
        assert all((image[:, 31:] == 128).all() for image in images)
        assert len({tuple(image[:, 5, 10].tolist()) for image in images}) >= num_colors
        assert all(sample["instances"].gt_boxes.tensor[0].tolist() == [5, 3, 26, 11] for sample in samples)


# -- copy-paste ------------------------------------------------------------------------------------

SIZE = (35, 48)
# Objects of the image: partly covered, completely covered, and uncovered but smaller than MIN_VISIBLE_PIXELS.
RED_ONE, GREEN_ONE = Rectangle(2, 20, 3, 30, RED, 0), Rectangle(21, 30, 10, 20, GREEN, 1)
BLUE_ONE = Rectangle(2, 5, 40, 44, BLUE, 2)
# Objects of the other image, which cover the first two objects.
YELLOW_ONE, CYAN_ONE = Rectangle(10, 33, 8, 25, YELLOW, 2), Rectangle(30, 34, 40, 46, CYAN, 1)
ALL = np.array([True, True])


def padding() -> Mapper:
    """Return a mapper whose jitter only pads an image, so that the colors show the objects."""
    return lsj(1.0, "INPUT.RANDOM_FLIP", "none", size=48)


@pytest.fixture
def sample_of(tmp_path):
    def make(name: str, *objects: Rectangle, size: tuple[int, int] = SIZE) -> dict:
        return padding()(write_record(tmp_path, name, size, *objects))

    return make


def check(sample: dict, *colors: tuple[int, int, int]) -> None:
    """Check that the masks are the visible pixels of these colors, in this order."""
    instances = sample["instances"]
    visible = torch.stack([pixels_of(sample["image"], color) for color in colors])
    assert torch.equal(instances.gt_masks.tensor, visible)
    assert instances.gt_boxes.tensor.tolist() == boxes_of(visible)
    classes = {RED: 0, GREEN: 1, BLUE: 2, YELLOW: 2, CYAN: 1}
    assert instances.gt_classes.tolist() == [classes[color] for color in colors]


@pytest.mark.parametrize("rle, size", [(False, SIZE), (True, (48, 48))])
def test_masks_and_boxes_under_occlusion(sample_of, rle, size):
    objects = [replace(one, rle=rle) for one in (RED_ONE, GREEN_ONE, BLUE_ONE, YELLOW_ONE, CYAN_ONE)]
    sample, other = sample_of("a", *objects[:3], size=size), sample_of("b", *objects[3:])
    check(sample, RED, GREEN, BLUE)
    image = sample["image"].clone()
    pasted = paste(sample, other, ALL)
    # The green object is completely covered.
    check(pasted, RED, BLUE, YELLOW, CYAN)
    assert pasted["pasted_from"] == other["file_name"] and pasted["file_name"] == sample["file_name"]
    # The inputs are not modified.
    check(sample, RED, GREEN, BLUE)
    check(other, YELLOW, CYAN)
    assert torch.equal(sample["image"], image) and "pasted_from" not in sample
    check(paste(sample, other, np.array([False, True])), RED, GREEN, BLUE, CYAN)


@pytest.mark.parametrize("left, colors", [(8, (RED, YELLOW)), (7, (YELLOW,))])
def test_barely_visible_objects_are_removed(sample_of, left, colors):
    """MIN_VISIBLE_PIXELS are 8 rows of 8 columns."""
    assert MIN_VISIBLE_PIXELS == 64
    sample = sample_of("a", Rectangle(4, 12, 5, 40, RED))
    check(paste(sample, sample_of("b", Rectangle(0, 35, 5 + left, 48, YELLOW, 2)), np.array([True])), *colors)


def test_crowds_are_covered_and_never_pasted(sample_of):
    crowd = Rectangle(6, 33, 2, 40, GREEN, 1, rle=True, crowd=True)
    pasted = paste(sample_of("a", crowd, BLUE_ONE), sample_of("b", YELLOW_ONE), np.array([True]))
    check(pasted, BLUE, YELLOW)
    assert pixels_of(pasted["image"], GREEN).sum() == 27 * 38 - 23 * 17
    sample = sample_of("a", RED_ONE)
    with_crowd = paste(sample, sample_of("d", crowd, CYAN_ONE), np.array([True]))
    check(with_crowd, RED, CYAN)
    assert not pixels_of(with_crowd["image"], GREEN).any()


def test_images_without_objects(sample_of):
    sample, empty = sample_of("a", RED_ONE), sample_of("b")
    assert paste(sample, empty, np.array([], bool)) is sample
    assert paste(sample, sample_of("c", YELLOW_ONE, CYAN_ONE), ~ALL) is sample
    check(paste(empty, sample, np.array([True])), RED)


def test_share_of_images_with_pasted_objects(tmp_path):
    own = write_record(tmp_path, "a", SIZE, RED_ONE)
    others = [write_record(tmp_path, name, SIZE, YELLOW_ONE, CYAN_ONE) for name in "bcd"]
    for probability in (0.0, 0.5, 1.0):
        np.random.seed(0)
        copy_paste = CopyPaste(padding(), [own, *others], probability=probability)
        samples = [copy_paste(own) for _ in range(40)]
        pasted = [sample["pasted_from"] for sample in samples if "pasted_from" in sample]
        # No object is chosen with probability 1/4 for an image with two objects, and 1/2 for an image with one.
        expected = probability * (0.75 * 0.75 + 0.25 * 0.5) * len(samples)
        assert abs(len(pasted) - expected) <= 0.2 * len(samples) * (probability > 0)
    assert set(pasted) == {record["file_name"] for record in (own, *others)}
    assert {len(sample["instances"]) for sample in samples} == {1, 2, 3}


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "detector, overrides, key",
    [
        ("retinanet", [*LSJ, "INPUT.CROP.ENABLED", "True"], "INPUT.CROP.ENABLED"),
        ("retinanet", [*STRONG, "MODEL.MASK_ON", "True"], "INPUT.COPY_PASTE.PROBABILITY 0.0"),
        ("mask_rcnn", [*STRONG, "MODEL.MASK_ON", "False"], "INPUT.COPY_PASTE.PROBABILITY 0.0"),
        ("mask_rcnn", [*STRONG, "MODEL.KEYPOINT_ON", "True"], "INPUT.COPY_PASTE.PROBABILITY 0.0"),
        ("semantic_fpn", LSJ, "INPUT.AUGMENTATION"),
        ("semantic_fpn", ["INPUT.CROP.TYPE", "relative", "INPUT.CROP.PAD", "True"], "INPUT.CROP.PAD"),
    ],
)
def test_values_that_cannot_be_used(detector, overrides, key):
    assert key in message(check_values, small_config(detector, *overrides))
    if key == "INPUT.COPY_PASTE.PROBABILITY 0.0":
        check_values(small_config(detector, *overrides, "INPUT.COPY_PASTE.PROBABILITY", "0.0"))
