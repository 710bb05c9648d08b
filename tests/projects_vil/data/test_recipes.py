"""Large-scale jitter: what a model sees of images, masks and boxes, and which keys go together."""

import numpy as np
import pytest
import torch
from detectron2.data import transforms as T

from projects_vil.data import Mapper
from projects_vil.engine import check_setup
from projects_vil.engine.checks import check_values
from tests.projects_vil.data.drawn import BLUE, GREEN, RED, Drawn, boxes_of, pixels_of, write_record
from tests.projects_vil.data.own import load, message
from tests.projects_vil.helpers import small_config

LSJ = ("INPUT.AUGMENTATION", "lsj")
STRONG = ("INPUT.AUGMENTATION", "strong")
COLORS = (RED, GREEN, BLUE)
OBJECTS = (Drawn(3, 11, 5, 26, RED), Drawn(14, 29, 30, 43, GREEN, 1), Drawn(20, 30, 2, 10, BLUE, 2))


def mapper(*overrides: str, detector: str = "mask_rcnn") -> Mapper:
    return Mapper(small_config(detector, *LSJ, *overrides), is_train=True)


def scaled(factor: float, *overrides: str, size: int = 47, **kwargs) -> Mapper:
    """A jitter that draws one factor alone."""
    keys = ("INPUT.LSJ.SIZE", str(size), "INPUT.LSJ.SCALE", f"({factor}, {factor})")
    return mapper(*keys, *overrides, **kwargs)


def mapped(function: Mapper, record: dict, *, seed: int = 0) -> dict:
    np.random.seed(seed)
    return function(record)


# -- images, masks and boxes -----------------------------------------------------------------------


def test_as_in_the_new_baselines_of_detectron2():
    """mask_rcnn_R_50_FPN_100ep_LSJ.py of configs/new_baselines, with an image_size of 1024."""
    built = mapper("INPUT.RANDOM_FLIP", "horizontal")
    resize, cut, pad, flip = built.augmentations.augs
    assert isinstance(resize, T.ResizeScale) and isinstance(flip, T.RandomFlip) and flip.horizontal
    assert (resize.min_scale, resize.max_scale, resize.target_height, resize.target_width) == (0.1, 2.0, 1024, 1024)
    assert {type(cut), type(pad)} == {T.FixedSizeCrop} and cut.crop_size == pad.crop_size == (1024, 1024)
    theirs = T.FixedSizeCrop((1024, 1024))
    assert (pad.pad, pad.pad_value, pad.seg_pad_value) == (True, theirs.pad_value, theirs.seg_pad_value)
    assert built.recompute_boxes and not mapper(detector="retinanet").recompute_boxes


@pytest.mark.parametrize("size", [(31, 47), (47, 31)])
def test_the_same_image_as_detectron2s_own_augmentations(tmp_path, size):
    record = write_record(tmp_path, "a", size, Drawn(3, 11, 5, 26))
    theirs = T.AugmentationList([T.ResizeScale(0.1, 2.0, 64, 64), T.FixedSizeCrop((64, 64))])
    ours = mapper("INPUT.LSJ.SIZE", "64", "INPUT.RANDOM_FLIP", "none")
    drawn = np.zeros((*size, 3), np.uint8)
    drawn[3:11, 5:26] = RED
    for seed in range(5):
        image = mapped(ours, record, seed=seed)["image"]
        np.random.seed(seed)
        inputs = T.AugInput(drawn)
        theirs(inputs)
        assert image.shape == (3, 64, 64) and (inputs.image == image.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("rle", [False, True])
@pytest.mark.parametrize("flip", ["none", "horizontal"])
def test_masks_are_what_is_seen_and_boxes_those_of_the_masks(tmp_path, factor, rle, flip):
    objects = [Drawn(**vars(drawn) | {"rle": rle}) for drawn in OBJECTS]
    record = write_record(tmp_path, "a", (31, 47), *objects)
    numbers = set()
    for seed in range(8):
        sample = mapped(scaled(factor, "INPUT.RANDOM_FLIP", flip), record, seed=seed)
        instances = sample["instances"]
        assert sample["image"].shape == (3, 47, 47) and instances.image_size == (47, 47)
        masks = instances.gt_masks.tensor
        # What falls out of the cut is no object.
        seen = [pixels_of(sample["image"], color) for color in COLORS]
        kept = [number for number, pixels in enumerate(seen) if pixels.any()]
        assert instances.gt_classes.tolist() == kept
        assert torch.equal(masks, torch.stack([seen[number] for number in kept]))
        assert instances.gt_boxes.tensor.tolist() == boxes_of(masks)
        numbers.add(len(kept))
    assert numbers == {3} if factor == 1 else min(numbers) < 3


@pytest.mark.parametrize("rle", [False, True])
def test_padding_is_grey_and_no_part_of_an_object(tmp_path, rle):
    record = write_record(tmp_path, "a", (31, 47), Drawn(0, 31, 0, 47, rle=rle))
    sample = mapped(scaled(1, "INPUT.RANDOM_FLIP", "none"), record)
    assert (sample["image"][:, 31:] == 128).all() and not sample["instances"].gt_masks.tensor[:, 31:].any()
    assert sample["instances"].gt_boxes.tensor.tolist() == [[0, 0, 47, 31]]


@pytest.mark.parametrize("factor", [0.53, 1.37, 2])
def test_boxes_without_masks_are_cut_alike(tmp_path, factor):
    """A mask has whole pixels; the box of one that is not cut is as exact as without it."""
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    for seed in range(6):
        with_masks, without = (
            mapped(scaled(factor, detector=detector), record, seed=seed)["instances"]
            for detector in ("mask_rcnn", "retinanet")
        )
        assert without.gt_classes.tolist() == with_masks.gt_classes.tolist() and not without.has("gt_masks")
        torch.testing.assert_close(without.gt_boxes.tensor, with_masks.gt_boxes.tensor, atol=1e-5, rtol=0)


def test_the_box_of_a_triangle_that_is_cut(tmp_path):
    """What is left of it towards its tip, on the left, is less high than its own box, which is only cut off."""
    record = write_record(tmp_path, "a", (60, 60), Drawn(5, 55, 4, 56))
    record["annotations"][0]["segmentation"] = [[4.0, 30.0, 56.0, 5.0, 56.0, 55.0]]
    left_parts = 0
    for seed in range(8):
        instances = mapped(scaled(1.9, "INPUT.RANDOM_FLIP", "none", size=60), record, seed=seed)["instances"]
        [box], [seen] = instances.gt_boxes.tensor, instances.gt_masks.get_bounding_boxes().tensor
        assert (box - seen).abs().max() <= 1
        # Of the 95 that are 1.9 times 50 the image has 60.
        left_parts += int(seen[3] - seen[1] < 58)
    assert left_parts


def test_a_narrow_image_at_a_small_scale(tmp_path):
    record = write_record(tmp_path, "a", (2, 300), Drawn(0, 2, 5, 200))
    sample = mapped(scaled(0.1, size=96), record)
    assert sample["image"].shape == (3, 96, 96) and (sample["image"][:, 1:] == 128).all()


def test_an_image_of_crowds_or_nothing(tmp_path):
    crowd = write_record(tmp_path, "a", (31, 47), Drawn(3, 11, 5, 26, rle=True, crowd=True))
    for record in (crowd, crowd | {"annotations": []}):
        assert len(mapped(scaled(1), record)["instances"]) == 0


@pytest.mark.parametrize("detector", ["mask_rcnn", "retinanet"])
def test_images_for_testing_stay_as_they_are(copy, detector):
    record = load(copy)[0]
    images = [
        Mapper(small_config(detector, "INPUT.AUGMENTATION", name), is_train=False)(record)["image"]
        for name in ("default", "lsj")
    ]
    assert torch.equal(*images)


def test_crops_of_a_mask_rcnn_need_no_library_that_detectron2_does_not_require(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    crop = ["INPUT.CROP.ENABLED", "True", "INPUT.CROP.TYPE", "absolute", "INPUT.CROP.SIZE", "[20, 30]"]
    cfg = small_config("mask_rcnn", *crop, "INPUT.MIN_SIZE_TRAIN", "(20,)")
    instances = mapped(Mapper(cfg, is_train=True), record)["instances"]
    assert len(instances) and instances.gt_boxes.tensor.tolist() == boxes_of(instances.gt_masks.tensor)


def test_colours_change_in_strong_alone_and_the_padding_stays_grey(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    cfg = small_config("mask_rcnn", *STRONG, "INPUT.LSJ.SIZE", "47", "INPUT.LSJ.SCALE", "(1.0, 1.0)")
    images = [mapped(Mapper(cfg, is_train=True), record, seed=seed)["image"] for seed in range(6)]
    assert len({tuple(image[:, 5, 10].tolist()) for image in images}) > 3
    assert all((image[:, 31:] == 128).all() for image in images)
    distorted = mapper("INPUT.PHOTOMETRIC_DISTORTION", "True", "INPUT.LSJ.SIZE", "47").augmentations.augs
    assert len(distorted) == len(mapper().augmentations.augs) + 1


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, text",
    [
        (["INPUT.AUGMENTATION", "lsjj"], "unknown INPUT.AUGMENTATION 'lsjj': it is one of default, lsj, strong"),
        (["INPUT.LSJ.SIZE", "31"], "INPUT.LSJ.SIZE is 31: it is the side of a square, 32 to 8192 pixels"),
        (["INPUT.LSJ.SIZE", "9000"], "INPUT.LSJ.SIZE is 9000: it is the side of a square, 32 to 8192 pixels"),
        (["INPUT.LSJ.SCALE", "(2.0, 0.1)"], "INPUT.LSJ.SCALE is (2.0, 0.1): it is two factors above 0"),
        (["INPUT.LSJ.SCALE", "(0.0, 1.0)"], "INPUT.LSJ.SCALE is (0.0, 1.0): it is two factors above 0"),
        (["INPUT.LSJ.SCALE", "(0.1, 99.0)"], "INPUT.LSJ.SCALE is (0.1, 99.0): it is two factors above 0 and at most"),
        (["INPUT.LSJ.SCALE", "(1.0,)"], "INPUT.LSJ.SCALE is (1.0,): it is two factors"),
        (["INPUT.LSJ.SCALE", "('a', 1.0)"], "INPUT.LSJ.SCALE is ('a', 1.0): it is two factors"),
        (["INPUT.COPY_PASTE.PROBABILITY", "1.5"], "INPUT.COPY_PASTE.PROBABILITY is 1.5: it is 0 to 1"),
        ([*LSJ, "INPUT.CROP.ENABLED", "True"], "INPUT.CROP.ENABLED is True, and INPUT.AUGMENTATION lsj cuts images"),
        (STRONG, "INPUT.AUGMENTATION strong pastes objects by their masks"),
        ([*STRONG, "MODEL.MASK_ON", "True"], "INPUT.AUGMENTATION strong pastes objects by their masks"),
    ],
)
def test_a_value_that_cannot_be_used(overrides, text):
    assert message(check_values, small_config("retinanet", *overrides)).startswith(text)


@pytest.mark.parametrize("keys", [["MODEL.MASK_ON", "False"], ["MODEL.KEYPOINT_ON", "True"]])
def test_what_is_pasted_has_masks_and_no_keypoints(keys):
    text = message(check_values, small_config("mask_rcnn", *STRONG, *keys))
    assert f"{keys[0]} {keys[1]}" in text and text.endswith("add INPUT.COPY_PASTE.PROBABILITY 0.0")
    check_values(small_config("mask_rcnn", *STRONG, *keys, "INPUT.COPY_PASTE.PROBABILITY", "0.0"))


def test_objects_of_images_that_are_not_trained_on_are_not_pasted():
    subset = ["DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler"]
    text = message(check_values, small_config("mask_rcnn", *STRONG, *subset))
    assert text.startswith("INPUT.AUGMENTATION strong pastes objects of all images, and DATALOADER.SAMPLER_TRAIN")
    check_values(small_config("mask_rcnn", *LSJ, *subset))


def test_label_images_are_not_jittered():
    text = message(check_values, small_config("semantic_fpn", *LSJ))
    assert text.startswith("INPUT.AUGMENTATION is lsj, which is for boxes and masks")


def test_tables_of_positions_reach_as_far(shapes):
    absolute = ["MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1", "MODEL.TRANSFORMER.MAX_IMG_SIZE", "96", *LSJ]
    text = message(check_setup, small_config("retinanet", *absolute, "INPUT.LSJ.SIZE", "97"))
    assert text.startswith("INPUT.LSJ.SIZE is 97, and this model's tables of positions end at MODEL.TRANSFORMER.MAX_")
    check_setup(small_config("retinanet", *absolute, "INPUT.LSJ.SIZE", "96"))
    check_setup(small_config("retinanet", *absolute[:4], "INPUT.LSJ.SIZE", "97"))
