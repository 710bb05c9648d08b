"""Datasets by name."""

import contextlib

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from projects_vil.data import load_dataset, register_datasets
from tests.projects_vil.data.own import NAME, config, entry, load, message
from tests.projects_vil.helpers import small_config


def test_shapes_follow_the_environment(shapes, tmp_path, monkeypatch):
    assert MetadataCatalog.get("shapes_train").json_file == str(shapes / "annotations/instances_train.json")
    assert MetadataCatalog.get("shapes_val").image_root == str(shapes / "val")
    assert len(load_dataset(small_config(), ["shapes_train"], train=True)) == 16
    assert len(load_dataset(small_config(), ["shapes_train", "shapes_val"], train=True)) == 24
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_datasets(small_config())
    assert str(tmp_path) in message(load_dataset, small_config(), ["shapes_train"], train=True)


def test_own_dataset_given_as_an_override(copy):
    records = load(copy)
    assert len(records) == 8
    assert MetadataCatalog.get(NAME).thing_classes == ["circle", "square", "triangle"]
    assert MetadataCatalog.get(NAME).evaluator_type == "coco"
    register_datasets(config(entry(copy)))


def test_same_name_with_other_files(copy):
    register_datasets(config(entry(copy)))
    other = [NAME, str(copy / "other.json"), str(copy / "images")]
    text = message(register_datasets, config(other))
    assert NAME in text and str(copy / "annotations.json") in text


def test_a_name_that_starts_like_those_of_the_demo_clashes_too(copy):
    name = "shapes_of_mine"
    try:
        register_datasets(config(entry(copy, name)))
        assert name in message(register_datasets, config([name, "other.json", str(copy / "images")]))
    finally:
        with contextlib.suppress(KeyError):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


def test_name_of_a_builtin_dataset(copy):
    text = message(register_datasets, config(entry(copy, "coco_2017_train")))
    assert "coco_2017_train" in text and "already" in text


@pytest.mark.parametrize(
    "wrong", ["name", ["name", "a.json"], ["name", "a.json", 3], 3, ["", "a.json", "images"]]
)
def test_entry_that_is_no_triple(wrong):
    assert "[name, annotation file, image folder]" in message(register_datasets, config(wrong))
