"""Pasting by drawing: what is seen of each object is its mask, and its box is that of the mask."""

from itertools import chain, islice

import numpy as np
import pytest
import torch

from projects_vil.data import Mapper, build_train_loader
from projects_vil.data.copy_paste import MIN_VISIBLE_PIXELS, CopyPaste, paste, paste_sample
from tests.projects_vil.data.drawn import BLUE, CYAN, GREEN, RED, YELLOW, Drawn, boxes_of, pixels_of, write_record
from tests.projects_vil.helpers import small_config

SIZE = (35, 48)
# Of the image: one to be covered in part, one wholly, one not at all, and too small to be left over, but not covered.
RED_ONE, GREEN_ONE, BLUE_ONE = (
    Drawn(2, 20, 3, 30, RED, 0),
    Drawn(21, 30, 10, 20, GREEN, 1),
    Drawn(2, 5, 40, 44, BLUE, 2),
)
# Of the other image, over the first two.
YELLOW_ONE, CYAN_ONE = Drawn(10, 33, 8, 25, YELLOW, 2), Drawn(30, 34, 40, 46, CYAN, 1)


@pytest.fixture
def mapper() -> Mapper:
    """A jitter that leaves the image as it is, but for padding: what was drawn can be told by its colours."""
    keys = ["INPUT.AUGMENTATION", "lsj", "INPUT.LSJ.SIZE", "48", "INPUT.LSJ.SCALE", "(1.0, 1.0)"]
    return Mapper(small_config("mask_rcnn", *keys, "INPUT.RANDOM_FLIP", "none"), is_train=True)


@pytest.fixture
def sample_of(mapper, tmp_path):
    def make(name: str, *objects: Drawn, size: tuple[int, int] = SIZE) -> dict:
        return mapper(write_record(tmp_path, name, size, *objects))

    return make


def check(sample: dict, *colors: tuple[int, int, int]) -> None:
    """Whether the instances are what is seen of these colours, in this order."""
    instances = sample["instances"]
    seen = torch.stack([pixels_of(sample["image"], color) for color in colors])
    assert torch.equal(instances.gt_masks.tensor, seen)
    assert instances.gt_boxes.tensor.tolist() == boxes_of(seen)
    classes = {RED: 0, GREEN: 1, BLUE: 2, YELLOW: 2, CYAN: 1}
    assert instances.gt_classes.tolist() == [classes[color] for color in colors]


ALL = np.array([True, True])

# -- two images ------------------------------------------------------------------------------------


def test_what_is_below_is_no_longer_seen():
    generator = torch.Generator().manual_seed(1)
    image, other = torch.randint(0, 256, (2, 3, 13, 17), generator=generator, dtype=torch.uint8)
    masks, other_masks = torch.zeros(3, 13, 17, dtype=torch.bool), torch.zeros(2, 13, 17, dtype=torch.bool)
    masks[0, 2:9, 3:15], masks[1, 5:6, 5:6] = True, True
    other_masks[0, 4:13, 4:8], other_masks[1, 4:7, 7:17] = True, True
    pasted, left = paste(image, masks, other, other_masks)
    for row in range(13):
        for column in range(17):
            covered = bool(other_masks[:, row, column].any())
            assert torch.equal(pasted[:, row, column], (other if covered else image)[:, row, column])
            assert left[:, row, column].tolist() == [bool(mask) and not covered for mask in masks[:, row, column]]


@pytest.mark.parametrize("rle", [False, True])
@pytest.mark.parametrize("size", [SIZE, (48, 48)])
def test_masks_and_boxes_under_occlusion(sample_of, rle, size):
    own, others = (RED_ONE, GREEN_ONE, BLUE_ONE), (YELLOW_ONE, CYAN_ONE)
    own, others = ([Drawn(**vars(drawn) | {"rle": rle}) for drawn in drawns] for drawns in (own, others))
    sample, other = sample_of("a", *own, size=size), sample_of("b", *others)
    check(sample, RED, GREEN, BLUE)
    image = sample["image"].clone()
    pasted = paste_sample(sample, other, ALL)
    # The green one is covered wholly.
    check(pasted, RED, BLUE, YELLOW, CYAN)
    assert pasted["pasted_from"] == other["file_name"] and pasted["file_name"] == sample["file_name"]
    # Both images stay as they are: another one may be pasted of them.
    check(sample, RED, GREEN, BLUE), check(other, YELLOW, CYAN)
    assert torch.equal(sample["image"], image) and "pasted_from" not in sample


def test_the_box_shrinks_with_the_mask(sample_of):
    sample, other = sample_of("a", RED_ONE), sample_of("b", Drawn(0, 35, 20, 48, YELLOW, 2))
    pasted = paste_sample(sample, other, np.array([True]))
    assert pasted["instances"].gt_boxes.tensor.tolist() == [[3, 2, 20, 20], [20, 0, 48, 35]]


def test_some_are_chosen(sample_of):
    sample, other = sample_of("a", RED_ONE, GREEN_ONE, BLUE_ONE), sample_of("b", YELLOW_ONE, CYAN_ONE)
    check(paste_sample(sample, other, np.array([False, True])), RED, GREEN, BLUE, CYAN)


@pytest.mark.parametrize("left, is_kept", [(8, True), (7, False)])
def test_what_little_is_left_of_an_object_is_none(sample_of, left, is_kept):
    """8 rows of 8 columns are MIN_VISIBLE_PIXELS."""
    assert MIN_VISIBLE_PIXELS == 64
    sample, other = sample_of("a", Drawn(4, 12, 5, 40, RED)), sample_of("b", Drawn(0, 35, 5 + left, 48, YELLOW, 2))
    pasted = paste_sample(sample, other, np.array([True]))
    check(pasted, *((RED, YELLOW) if is_kept else (YELLOW,)))
    assert pixels_of(pasted["image"], RED).sum() == 8 * left


def test_objects_that_are_pasted_overlap_as_in_their_own_image(sample_of):
    """Their annotations say so: the lower one was annotated as if nothing lay over it."""
    lower, upper = Drawn(5, 20, 5, 25, YELLOW, 2), Drawn(10, 15, 10, 40, CYAN, 1)
    other = sample_of("b", lower, upper)
    pasted = paste_sample(sample_of("a", BLUE_ONE), other, ALL)
    assert torch.equal(pasted["instances"].gt_masks.tensor[1:], other["instances"].gt_masks.tensor)
    assert torch.equal(pasted["image"][:, 5:20, 5:40], other["image"][:, 5:20, 5:40])


def test_crowds_are_covered_and_never_pasted(sample_of):
    crowd = Drawn(6, 33, 2, 40, GREEN, 1, rle=True, crowd=True)
    pasted = paste_sample(sample_of("a", crowd, BLUE_ONE), sample_of("b", YELLOW_ONE), np.array([True]))
    check(pasted, BLUE, YELLOW)
    assert pixels_of(pasted["image"], GREEN).sum() == 27 * 38 - 23 * 17
    only_crowd = sample_of("c", crowd)
    sample = sample_of("a", RED_ONE)
    assert len(only_crowd["instances"]) == 0 and paste_sample(sample, only_crowd, np.array([], bool)) is sample
    of_both = paste_sample(sample, sample_of("d", crowd, CYAN_ONE), np.array([True]))
    check(of_both, RED, CYAN)
    assert not pixels_of(of_both["image"], GREEN).any()


def test_nothing_to_paste_and_nothing_to_paste_over(sample_of):
    sample, empty = sample_of("a", RED_ONE), sample_of("b")
    assert paste_sample(sample, empty, np.array([], bool)) is sample
    assert paste_sample(sample, sample_of("c", YELLOW_ONE, CYAN_ONE), ~ALL) is sample
    check(paste_sample(empty, sample, np.array([True])), RED)


# -- records ---------------------------------------------------------------------------------------


def draws(function: CopyPaste, record: dict, *, number: int = 40) -> list[dict]:
    np.random.seed(0)
    return [function(record) for _ in range(number)]


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_a_share_of_the_images_get_objects(mapper, tmp_path, probability):
    own = write_record(tmp_path, "a", SIZE, RED_ONE)
    others = [write_record(tmp_path, name, SIZE, YELLOW_ONE, CYAN_ONE) for name in "bcd"]
    drawn = draws(CopyPaste(mapper, [own, *others], probability=probability), own)
    pasted = [sample["pasted_from"] for sample in drawn if "pasted_from" in sample]
    # Of two objects none is chosen in a quarter of the cases, of the image's own one in half.
    expected = probability * (0.75 * 0.75 + 0.25 * 0.5) * len(drawn)
    assert abs(len(pasted) - expected) <= 0.2 * len(drawn) * (probability > 0)
    if probability == 1:
        assert set(pasted) == {record["file_name"] for record in (own, *others)}
        assert {len(sample["instances"]) for sample in drawn} == {1, 2, 3}


def test_one_photo_alone_gets_its_own_objects(mapper, tmp_path):
    record = write_record(tmp_path, "a", SIZE, RED_ONE)
    drawn = draws(CopyPaste(mapper, [record], probability=1.0), record, number=6)
    assert {sample.get("pasted_from") for sample in drawn} == {None, record["file_name"]}
    for sample in drawn:
        check(sample, RED)


# -- loaders ---------------------------------------------------------------------------------------


def batches(*, workers: int, first: int, number: int) -> list[list[dict]]:
    keys = ["INPUT.AUGMENTATION", "strong", "INPUT.LSJ.SIZE", "48", "SOLVER.IMS_PER_BATCH", "3"]
    loader = build_train_loader(small_config("mask_rcnn", *keys, "DATALOADER.NUM_WORKERS", str(workers)))
    loader.start(seed=7, iteration=first)
    drawn = list(islice(loader, number))
    loader.stop()
    return drawn


def test_batches_depend_on_the_seed_and_the_iteration_alone(shapes):
    whole = batches(workers=0, first=0, number=6)
    assert any("pasted_from" in sample for batch in whole for sample in batch)
    assert_same(batches(workers=2, first=0, number=6), whole)
    assert_same(batches(workers=1, first=4, number=2), whole[4:])


def assert_same(batches: list[list[dict]], others: list[list[dict]]) -> None:
    for sample, other in zip(chain(*batches), chain(*others), strict=True):
        assert torch.equal(sample["image"], other["image"])
        assert sample.get("pasted_from") == other.get("pasted_from")
        instances, others_instances = sample["instances"], other["instances"]
        assert torch.equal(instances.gt_boxes.tensor, others_instances.gt_boxes.tensor)
        assert torch.equal(instances.gt_masks.tensor, others_instances.gt_masks.tensor)
