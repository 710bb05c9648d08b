"""Test panoptic datasets: things of a COCO file and stuff of label images."""

import shutil

import cv2
import pytest
import torch
from detectron2.data import MetadataCatalog

from projects_vil.data import Mapper, class_order, load_dataset, register_datasets
from projects_vil.engine import check_setup
from tests.projects_vil.helpers import message, small_config
from tests.projects_vil.panoptic import TRAIN, VAL, panoptic_config


@pytest.fixture
def folder(panoptic_root, tmp_path, monkeypatch):
    """Return a copy of the dataset that tests may change."""
    shutil.copytree(panoptic_root, tmp_path / "data")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
    register_datasets(panoptic_config())
    return tmp_path / "data/shapes_panoptic"


def test_stuff_covers_all_pixels_without_things(folder):
    cfg = panoptic_config("INPUT.RANDOM_FLIP", "none", "INPUT.MASK_FORMAT", "bitmask", "INPUT.MIN_SIZE_TEST", "0")
    assert MetadataCatalog.get(VAL).stuff_classes == ["things", "background"]
    records = load_dataset(cfg, [VAL], train=False)
    assert len(records) == 4
    for record in records:
        mapped = Mapper(cfg, is_train=True)(record)
        labels, things = mapped["sem_seg"], mapped["instances"].gt_masks.tensor.any(0)
        assert labels.dtype == torch.int64 and labels.shape == mapped["image"].shape[1:] == things.shape
        assert set(labels.unique().tolist()) == {0, 1}
        # The polygons lie an eighth of a pixel inside the objects.
        assert ((labels == 0) != things).float().mean() < 0.03


def test_a_mask_rcnn_takes_the_things_alone(folder):
    cfg = small_config("mask_rcnn")
    records = load_dataset(cfg, [TRAIN], train=True)
    assert len(records) == 8 and not any("sem_seg_file_name" in record for record in records)
    assert "sem_seg" not in Mapper(cfg, is_train=True)(records[0])


def test_labels_that_are_missing_or_of_no_class(folder):
    cfg, path = panoptic_config(), min((folder / "stuff_train").iterdir())
    record = load_dataset(cfg, [TRAIN], train=True)[0]
    labels = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    cv2.imwrite(str(path), 7 * labels)
    assert str(path) in message(Mapper(cfg, is_train=True), record)
    path.unlink()
    for check in ("error", "off"):
        assert str(path) in message(load_dataset, panoptic_config("DATASETS.CHECK", check), [TRAIN], train=True)
    shutil.rmtree(folder / "stuff_train")
    assert str(folder / "stuff_train") in message(check_setup, cfg)


def test_classes_of_stuff_are_counted(folder):
    key = "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    text = message(class_order, panoptic_config(key, "54"), VAL)
    assert VAL in text and text.endswith(f"Set {key} 2.")


@pytest.mark.parametrize(
    "name, detector, named",
    [
        ("shapes_val", "panoptic", "shapes_val"),
        # The files of detectron2's datasets do not exist on this machine.
        ("coco_2017_train_panoptic", "panoptic", "coco_2017_train_panoptic_separated"),
        ("coco_2017_val_panoptic_separated", "mask_rcnn", "coco_2017_val_panoptic_separated"),
    ],
)
def test_other_datasets(shapes, name, detector, named):
    cfg = panoptic_config() if detector == "panoptic" else small_config(detector)
    assert named in message(load_dataset, cfg, [name], train=False)
