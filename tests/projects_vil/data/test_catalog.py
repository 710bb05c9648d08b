"""Datasets by name."""

import contextlib
import json

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from projects_vil.data import load_dataset, register_datasets
from projects_vil.data.catalog import read_categories
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
    assert "coco_2017_train" in text


@pytest.mark.parametrize("wrong", ["name", ["name", "a.json"], ["name", "a.json", 3], 3, ["", "a.json", "images"]])
def test_entry_that_is_no_triple(wrong):
    assert "DATASETS.COCO" in message(register_datasets, config(wrong))


# -- categories without the rest -------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("order", [["categories", "images", "annotations"], ["annotations", "images", "categories"]])
def test_class_names_wherever_they_stand(tmp_path, indent, order):
    content = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [],
        # By id, as detectron2 numbers them.
        "categories": [{"id": 7, "name": "[b]"}, {"id": 2, "name": "ä"}],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps({key: content[key] for key in order}, indent=indent))
    assert read_categories(str(path)) == [(2, "ä"), (7, "[b]")]
    # With a second list of that name, all of the file has to be parsed.
    path.write_text(json.dumps(content | {"images": [{"id": 1, "categories": []}]}))
    assert read_categories(str(path)) == [(2, "ä"), (7, "[b]")]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"categories": [3]}', '{"categories": ['])
def test_class_names_are_unknown_for_invalid_files(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert read_categories(str(tmp_path / "a.json")) is None
    assert read_categories(str(tmp_path)) is None and read_categories(None) is None
