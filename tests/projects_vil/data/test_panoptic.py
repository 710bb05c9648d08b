"""Things of a COCO file and stuff of label images, for a model that learns both."""

import shutil

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog

from projects_vil.data import Mapper, check_datasets, load_dataset, register_datasets
from projects_vil.engine import check_setup
from tests.projects_vil.data.own import message
from tests.projects_vil.helpers import small_config
from tests.projects_vil.panoptic import TRAIN, VAL, panoptic_config


@pytest.fixture
def folder(panoptic_root, tmp_path, monkeypatch):
    """A copy of the dataset that tests change."""
    shutil.copytree(panoptic_root, tmp_path / "data")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
    register_datasets(panoptic_config())
    return tmp_path / "data/shapes_panoptic"


def test_stuff_is_what_no_thing_covers(folder):
    cfg = panoptic_config("INPUT.RANDOM_FLIP", "none", "INPUT.MASK_FORMAT", "bitmask", "INPUT.MIN_SIZE_TEST", "0")
    assert MetadataCatalog.get(VAL).stuff_classes == ["things", "background"]
    records = load_dataset(cfg, [VAL], train=False)
    assert len(records) == 4
    for record in records:
        mapped = Mapper(cfg, is_train=True)(record)
        labels, things = mapped["sem_seg"], mapped["instances"].gt_masks.tensor.any(0)
        assert labels.dtype == torch.int64 and labels.shape == mapped["image"].shape[1:] == things.shape
        assert set(labels.unique().tolist()) == {0, 1}
        # Outlines as polygons are an eighth of a pixel inside.
        assert ((labels == 0) != things).float().mean() < 0.03


def test_a_mask_rcnn_takes_the_things_alone(folder):
    cfg = small_config("mask_rcnn")
    records = load_dataset(cfg, [TRAIN], train=True)
    assert len(records) == 8 and not any("sem_seg_file_name" in record for record in records)
    assert "sem_seg" not in Mapper(cfg, is_train=True)(records[0])


@pytest.mark.parametrize("check", ["error", "off"])
def test_labels_that_are_missing(folder, check):
    cfg, (first, *_) = panoptic_config("DATASETS.CHECK", check), sorted((folder / "stuff_train").iterdir())
    first.unlink()
    text = message(load_dataset, cfg, [TRAIN], train=True)
    assert str(first) in text
    shutil.rmtree(folder / "stuff_train")
    assert str(folder / "stuff_train") in message(check_setup, cfg)


def test_labels_that_are_no_class(folder):
    cfg = panoptic_config()
    record = load_dataset(cfg, [TRAIN], train=True)[0]
    labels = cv2.imread(record["sem_seg_file_name"], cv2.IMREAD_GRAYSCALE)
    cv2.imwrite(record["sem_seg_file_name"], np.where(labels == 1, 7, labels))
    text = message(Mapper(cfg, is_train=True), record)
    assert record["sem_seg_file_name"] in text and "7" in text


def test_classes_of_stuff_are_counted(folder):
    text = message(check_datasets, panoptic_config("MODEL.SEM_SEG_HEAD.NUM_CLASSES", "54"), [VAL])
    key = "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    assert VAL in text and text.endswith(f"add {key} 2")
    text = message(load_dataset, panoptic_config("MODEL.SEM_SEG_HEAD.IGNORE_VALUE", "7"), [VAL], train=False)
    assert "MODEL.SEM_SEG_HEAD.IGNORE_VALUE" in text


def test_a_dataset_without_stuff(shapes):
    text = message(load_dataset, panoptic_config(), ["shapes_val"], train=False)
    assert "shapes_val" in text


@pytest.mark.parametrize("split, detector", [("train", "panoptic"), ("val", "mask_rcnn"), ("val_100", "panoptic")])
def test_names_of_detectron2(split, detector):
    """Its files are not here: a line for each of its names."""
    cfg = panoptic_config() if detector == "panoptic" else small_config("mask_rcnn")
    name = f"coco_2017_{split}_panoptic"
    assert message(load_dataset, cfg, [name], train=False).endswith(f"{name}_separated")
    assert f"{name}_separated" in message(load_dataset, cfg, [f"{name}_separated"], train=False)
