"""Detections in a fixed number of rows, and back."""

import torch

from projects_vil.export.exportable.filling import filled_up, without_filling


def found() -> dict[str, torch.Tensor]:
    """Of four images: three detections, none, one, and two; the best of all first."""
    image = torch.tensor([3, 0, 0, 2, 3, 0])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.5, 0.5, 0.1])
    return {"boxes": torch.arange(24.0).view(6, 4), "scores": scores, "image_index": image}


def test_rows_of_each_image_then_zeros():
    rows = filled_up(found(), number=3, num_images=4)
    assert list(rows) == ["boxes", "scores", "count"] and rows["boxes"].shape == (4, 3, 4)
    assert rows["count"].tolist() == [3, 0, 1, 2] and rows["count"].dtype == torch.int64
    expected = torch.tensor([[0.8, 0.7, 0.1], [0, 0, 0], [0.5, 0, 0], [0.9, 0.5, 0]])
    assert torch.equal(rows["scores"], expected)
    assert rows["boxes"][3].tolist() == [[0, 1, 2, 3], [16, 17, 18, 19], [0] * 4]


def test_there_and_back():
    before, after = found(), without_filling(filled_up(found(), number=5, num_images=4))
    # Of two equal scores the one of the earlier image is first then.
    order = [0, 1, 2, 3, 4, 5]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name][order]) for name in before)


def test_nothing_found():
    nothing = {name: value[:0] for name, value in found().items()}
    rows = filled_up(nothing, number=2, num_images=3)
    assert rows["count"].tolist() == [0, 0, 0] and not rows["boxes"].any() and rows["boxes"].shape == (3, 2, 4)
    assert {name: len(value) for name, value in without_filling(rows).items()} == dict.fromkeys(nothing, 0)
