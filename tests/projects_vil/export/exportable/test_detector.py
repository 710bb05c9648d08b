"""The exportable detectors give detectron2's own answers."""

import pytest
import torch
from torch import Tensor

from projects_vil.export import make_exportable
from projects_vil.export.images import example_image
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.export.exportable.helpers import ALL, assert_equal, detector, run, with_threshold

SIZES = [(64, 64), (64, 97), (101, 64), (33, 47), (150, 203), (224, 129), (96, 320)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_detector(name, size):
    image = example_image(*size, seed=sum(size))
    theirs = eager_detections(detector(name), image)
    assert len(theirs["scores"]) >= 10 and theirs["scores"].std() > 0.005
    assert set(theirs) == {"boxes", "scores", "classes"} | ({"masks"} if name != "retinanet" else set())
    assert_equal(run(detector(name), image), theirs)


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ALL)
def test_a_uniform_image(name):
    for value in (0, 255):
        image = torch.full((3, 70, 90), value, dtype=torch.uint8)
        assert_equal(run(detector(name), image), eager_detections(detector(name), image))


@pytest.mark.parametrize("name", ALL)
def test_what_comes_out(name):
    found = run(detector(name), example_image(72, 110))
    boxes, scores = found["boxes"], found["scores"]
    assert boxes.dtype == scores.dtype == torch.float32 and found["classes"].dtype == torch.int64
    assert (boxes >= 0).all() and (boxes <= torch.tensor([110, 72, 110, 72])).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (scores[1:] <= scores[:-1]).all() and 0 <= found["classes"].min() and found["classes"].max() <= 2
    if name != "retinanet":
        assert found["masks"].shape == (len(scores), 1, 28, 28)
        assert 0 <= found["masks"].min() < 0.3 and 0.7 < found["masks"].max() <= 1


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ALL)
def test_what_else_is_in_a_batch_does_not_matter(name):
    mine, black = example_image(70, 101, seed=1), torch.zeros(3, 70, 101, dtype=torch.uint8)
    neighbours = (mine, black, 255 - mine)
    found = [run(detector(name), torch.stack([other, mine]), batched=True) for other in neighbours]
    for other in found[1:]:
        assert_equal(of_image(other, 1), of_image(found[0], 1), tolerance=5e-5)
    assert not torch.equal(of_image(found[1], 0)["boxes"], of_image(found[1], 1)["boxes"])


@pytest.mark.parametrize("name", ALL)
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
