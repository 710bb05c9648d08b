"""Test INPUT.ALBUMENTATIONS: boxes and masks match the pixels, runs repeat, and invalid files are errors."""

import pytest
import torch

from projects_vil.data import Mapper
from tests.projects_vil.data.custom_dataset import mapped
from tests.projects_vil.data.test_augmentation import BLUE, OBJECTS, RED, assert_visible, pixels_of, write_record
from tests.projects_vil.helpers import message, small_config

A = pytest.importorskip("albumentations", reason="needs albumentations")


def mapper_of(path, *overrides: str, detector: str = "mask_rcnn") -> Mapper:
    """Return a mapper that applies a pipeline and does not resize or flip after that."""
    keys = ("INPUT.ALBUMENTATIONS", str(path), "INPUT.RANDOM_FLIP", "none", "INPUT.MIN_SIZE_TRAIN", "(0,)")
    return Mapper(small_config(detector, *keys, *overrides), is_train=True)


def save(path, *transforms, **conditions) -> str:
    boxes = A.BboxParams(format="coco", **conditions) if conditions else None
    A.save(A.Compose(list(transforms), bbox_params=boxes), path, data_format=path.suffix[1:])
    return str(path)


@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_masks_are_the_visible_pixels_and_boxes_enclose_them(tmp_path, image_format, suffix):
    rotate = A.Affine(rotate=(-90, 90), translate_px=(-12, 12), interpolation=0, p=1)
    path = save(tmp_path / f"pipeline.{suffix}", A.HorizontalFlip(p=0.5), rotate)
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    mapper, images, numbers = mapper_of(path, "INPUT.FORMAT", image_format), [], set()
    for seed in range(8):
        sample = mapped(mapper, record, seed=seed)
        image = sample["image"] if image_format == "RGB" else sample["image"].flip(0)
        assert torch.equal(sample["image"], mapped(mapper, record, seed=seed)["image"])
        images.append(image)
        numbers.add(assert_visible(sample["instances"], image))
    assert len({image.numpy().tobytes() for image in images}) > 4 and min(numbers) < 3


def test_boxes_without_masks_follow_the_image(tmp_path):
    path = save(tmp_path / "a.yaml", A.HorizontalFlip(p=1), A.Crop(0, 0, 30, 31))
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    sample = mapped(mapper_of(path, detector="retinanet"), record)
    # The red object has the columns 21 to 42 of the flipped image, and the crop ends at 30. The blue one is outside.
    expected = torch.tensor([[21.0, 3, 30, 11], [4, 14, 17, 29]])
    torch.testing.assert_close(sample["instances"].gt_boxes.tensor, expected, atol=1e-3, rtol=0)
    assert sample["image"].shape == (3, 31, 30) and not pixels_of(sample["image"], BLUE).any()
    assert pixels_of(sample["image"], RED).sum() == 9 * 8
    # With the crop, 9 of the 21 columns of the red object are visible.
    path = save(tmp_path / "b.yaml", A.HorizontalFlip(p=1), A.Crop(0, 0, 30, 31), min_visibility=0.5)
    kept = mapped(mapper_of(path, detector="retinanet"), record)["instances"]
    assert kept.gt_classes.tolist() == [1]


def test_images_without_objects(tmp_path):
    path = save(tmp_path / "a.yaml", A.HorizontalFlip(p=1))
    for detector in ("retinanet", "mask_rcnn"):
        sample = mapped(mapper_of(path, detector=detector), write_record(tmp_path, "a", (31, 47)))
        assert len(sample["instances"]) == 0


def test_evaluation_does_not_augment(tmp_path):
    path = save(tmp_path / "a.yaml", A.Crop(0, 0, 10, 10))
    cfg = small_config("retinanet", "INPUT.ALBUMENTATIONS", path, "INPUT.MIN_SIZE_TEST", "0")
    assert mapped(Mapper(cfg, is_train=False), write_record(tmp_path, "a", (31, 47)))["image"].shape == (3, 31, 47)


def test_invalid_pipelines(tmp_path):
    record = write_record(tmp_path, "a", (31, 47), *OBJECTS)
    path = save(tmp_path / "a.yaml", A.Normalize())
    assert "Remove Normalize" in message(lambda: mapped(mapper_of(path), record))
    (tmp_path / "b.yaml").write_text("transforms: []")
    assert "b.yaml' is not a pipeline of Albumentations" in message(lambda: mapper_of(tmp_path / "b.yaml"))
    assert "INPUT.ALBUMENTATIONS" in message(lambda: mapper_of(tmp_path / "c.yaml"))
    assert "keypoints" in message(lambda: mapper_of(path, "MODEL.KEYPOINT_ON", "True"))
