"""Ids and names of classes: what a file says, whatever datasets are at hand, and else what a dataset says."""

import json

import pytest
import torch

from projects_vil.checkpoint import (
    PROVENANCE_KEY,
    Categories,
    Provenance,
    checked_ids,
    dataset_categories,
    known_categories,
    load_detector,
)
from projects_vil.data import register_datasets
from tests.projects_vil.helpers import lively_detector, small_config

SHAPES = Categories((1, 2, 3), ("circle", "square", "triangle"))


def test_what_a_file_says_stands_whatever_datasets_are_at_hand(shapes):
    for datasets in ((), ("shapes_val",), ("absent",)):
        known = known_categories(("circle", "square", "triangle"), (9, 4, 6), number=3, datasets=datasets)
        assert known == Categories((9, 4, 6), ("circle", "square", "triangle"))
        assert (known.colors is not None) == (datasets == ("shapes_val",))
    # Classes may be called by numbers, as digits are.
    assert known_categories(("7", "8", "9"), (1, 2, 3), number=3, datasets=("shapes_val",)).names == ("7", "8", "9")


def test_what_an_older_file_does_not_say(shapes):
    names = ("circle", "square", "triangle")
    assert known_categories(names, None, number=3, datasets=("absent", "shapes_val")) == SHAPES
    for unnamed in (None, ("0", "1", "2")):
        assert known_categories(unnamed, None, number=3, datasets=("shapes_val",)) == SHAPES
        assert known_categories(unnamed, None, number=3).names == ("class 1", "class 2", "class 3")
    other = known_categories(("a", "b", "c"), None, number=3, datasets=("shapes_val",))
    assert other == Categories((1, 2, 3), ("a", "b", "c")) and other.colors is None


def test_ids_of_coco_need_no_file():
    coco = dataset_categories(["coco_2017_val"], 80)
    assert coco.ids[11:13] == (13, 14) and coco.names[79] == "toothbrush"
    known = known_categories(coco.names, None, number=80)
    assert known == coco and len(known.colors) == 80
    assert known_categories(None, None, number=80).ids[11] == 12


def test_categories_of_a_dataset_are_in_the_order_of_their_ids(tmp_path):
    categories = [{"id": 30, "name": "c"}, {"id": 2, "name": "b"}, {"id": 11, "name": "a"}]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    register_datasets(small_config("retinanet", "DATASETS.COCO", str([[str(path), str(path), str(tmp_path)]])))
    expected = Categories((2, 11, 30), ("b", "a", "c"))
    assert dataset_categories([str(path)], 3) == expected
    assert dataset_categories([str(path)], 4) is None and dataset_categories([str(path)], 3, names=("a",) * 3) is None
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories[:2] * 2}))
    assert dataset_categories([str(path)], 3) is None
    path.write_text("{}")
    assert dataset_categories([str(path)], 3) is None


@pytest.mark.parametrize(
    "ids, checked",
    [
        ([3, 1], (3, 1)),
        ((3, 1), (3, 1)),
        ([3, 3], None),
        ([3], None),
        ([3, "1"], None),
        ([3, True], None),
        ("31", None),
        (None, None),
    ],
)
def test_ids_that_are_none(ids, checked):
    assert checked_ids(ids, ("a", "b")) == checked
    assert checked_ids(ids, None) is None


@pytest.fixture
def saved(tmp_path):
    """A checkpoint that says some classes."""
    cfg = small_config()
    model = lively_detector(cfg).state_dict()

    def save(**facts) -> str:
        said = Provenance(variant=cfg.MODEL.TRANSFORMER.NAME, **facts).to_dict()
        torch.save({"model": model, PROVENANCE_KEY: said}, tmp_path / "said.pth")
        return str(tmp_path / "said.pth")

    return save


def test_categories_of_a_loaded_detector(shapes, saved):
    """By the file; where the datasets have its classes in another order, so has the model, but for those who ask."""
    cfg, elsewhere = small_config(), small_config("retinanet", "DATASETS.TEST", "()", "DATASETS.TRAIN", "()")
    path = saved(classes=("triangle", "circle", "square"), category_ids=(30, 10, 20))
    own = Categories((30, 10, 20), ("triangle", "circle", "square"))
    bias = "head.cls_score.bias"
    as_saved, known = load_detector(elsewhere, path)
    assert known == own
    in_order, known = load_detector(cfg, path)
    assert known == Categories((10, 20, 30), ("circle", "square", "triangle"))
    rows, ordered = (model.state_dict()[bias].view(-1, 3) for model in (as_saved, in_order))
    assert torch.equal(ordered, rows[:, [1, 2, 0]])
    alone, known = load_detector(cfg, path, as_datasets=False)
    assert known == own and torch.equal(alone.state_dict()[bias].view(-1, 3), rows)
    for facts in ({}, {"classes": ("circle", "square", "triangle")}):
        assert load_detector(cfg, saved(**facts))[1] == SHAPES
    assert load_detector(elsewhere, saved())[1].names == ("class 1", "class 2", "class 3")
