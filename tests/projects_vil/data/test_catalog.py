"""Test the registration of datasets."""

import json
import runpy

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from projects_vil.data import catalog, load_dataset, read_datasets, register_datasets
from projects_vil.data.catalog import read_categories
from projects_vil.evaluation import build_evaluator
from tests.projects_vil.data.custom_dataset import NAME, config, entry, load
from tests.projects_vil.helpers import message, small_config


def test_shapes_follow_the_environment(shapes, tmp_path, monkeypatch):
    assert MetadataCatalog.get("shapes_train").json_file == str(shapes / "annotations/instances_train.json")
    assert MetadataCatalog.get("shapes_val").image_root == str(shapes / "val")
    assert len(load_dataset(small_config(), ["shapes_train", "shapes_val"], train=True)) == 24
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_datasets(small_config())
    assert str(tmp_path) in message(load_dataset, small_config(), ["shapes_train"], train=True)


def test_a_dataset_that_is_registered_again_is_read_again(copy, tmp_path):
    cfg = config(entry(copy))
    register_datasets(cfg)
    read_datasets(cfg)
    for _ in range(2):
        evaluator = build_evaluator(cfg, NAME, str(tmp_path / "out"))
        assert len(evaluator._evaluators[0].truth) == len(load_dataset(cfg, [NAME], train=True)) == 8
        DatasetCatalog.remove(NAME), MetadataCatalog.remove(NAME)
        register_datasets(cfg)


def test_the_class_names_of_a_dataset_may_be_unknown(copy, monkeypatch):
    monkeypatch.setitem(DatasetCatalog.data, "nameless", list(load(copy)).copy)
    cfg = small_config("retinanet", "DATASETS.TRAIN", "('nameless',)", "DATASETS.TEST", "()")
    assert len(load_dataset(cfg, ["nameless"], train=True)) == 8


def test_datasets_that_were_registered_before_the_import_are_kept(tmp_path, monkeypatch):
    before = dict(DatasetCatalog)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    runpy.run_path(catalog.__file__)
    assert dict(DatasetCatalog) == before and "ade20k_train" in before


def test_custom_datasets(copy):
    assert len(load(copy)) == 8
    metadata = MetadataCatalog.get(NAME)
    assert (metadata.thing_classes, metadata.evaluator_type) == (["circle", "square", "triangle"], "coco")
    # The same files may be registered again, but other files may not.
    register_datasets(config(entry(copy)))
    text = message(register_datasets, config([NAME, str(copy / "other.json"), str(copy / "images")]))
    assert NAME in text and str(copy / "annotations.json") in text
    assert "coco_2017_train" in message(register_datasets, config(entry(copy, "coco_2017_train")))
    for wrong in ("name", ["name", "a.json"], ["name", "a.json", 3], 3, ["", "a.json", "images"]):
        assert "DATASETS.COCO" in message(register_datasets, config(wrong))


# -- categories without the rest -------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("order", [["categories", "images", "annotations"], ["annotations", "images", "categories"]])
def test_categories_are_found_anywhere_in_the_file(tmp_path, indent, order):
    content = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [],
        # Sorted by id, as in detectron2.
        "categories": [{"id": 7, "name": "[b]"}, {"id": 2, "name": "ä"}],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps({key: content[key] for key in order}, indent=indent))
    assert list(read_categories(str(path)).items()) == [(2, "ä"), (7, "[b]")]
    # With a second key of that name, the whole file is parsed.
    path.write_text(json.dumps(content | {"images": [{"id": 1, "categories": []}]}))
    assert list(read_categories(str(path)).items()) == [(2, "ä"), (7, "[b]")]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"categories": [3]}', '{"categories": ['])
def test_categories_of_invalid_files_are_unknown(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert read_categories(str(tmp_path / "a.json")) is None
    assert read_categories(str(tmp_path)) is None and read_categories(None) is None
