"""The best of many candidates are torchvision's, group by group."""

import pytest
import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_iou, nms

from projects_vil.export.exportable.nms import best_of_row, best_without_overlap
from tests.projects_vil.export.exportable.helpers import random, random_boxes


@pytest.mark.parametrize("number, available", [(5, 20), (20, 20), (20, 7), (1000, 7), (3, 0)])
def test_best_of_row(number, available):
    scores = random(3, available)
    best, place = best_of_row(scores, number, filler=-1.0)
    assert best.shape == place.shape == (3, number)
    there = min(number, available)
    expected = scores.topk(there, dim=1)
    assert torch.equal(best[:, :there], expected.values) and torch.equal(place[:, :there], expected.indices)
    assert (best[:, there:] == -1).all() and (place[:, there:] == 0).all()


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
