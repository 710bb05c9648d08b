"""Classes of a model: ids and names from files and datasets, and rows of predictors matched by name."""

import json

import pytest
import torch

from backbones import ConfigError
from projects_vil import Checkpointer
from projects_vil.checkpoint import check_weights, load_detector
from projects_vil.checkpoint.metadata import METADATA_KEY, CheckpointMetadata
from projects_vil.data.catalog import Categories, known_categories, register_datasets
from tests.projects_vil.checkpoint.test_checkpointer import LOG, copy_of, detector, equal, log_of, save
from tests.projects_vil.helpers import small_config, untrained_detector

SHAPES = Categories((1, 2, 3), ("circle", "square", "triangle"))
THEIRS = ("cat", "dog", "person")
OURS = ("person", "zebra", "cat", "bird")
NUM_CLASSES = {
    "retinanet": "MODEL.RETINANET.NUM_CLASSES",
    "mask_rcnn": "MODEL.ROI_HEADS.NUM_CLASSES",
    "cascade_mask_rcnn": "MODEL.ROI_HEADS.NUM_CLASSES",
    "semantic_fpn": "MODEL.SEM_SEG_HEAD.NUM_CLASSES",
}
AGNOSTIC = ["MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True", "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"]


# Ids and names


def test_categories_of_a_dataset_are_sorted_by_id(tmp_path):
    categories = [{"id": 30, "name": "c"}, {"id": 2, "name": "b"}, {"id": 11, "name": "a"}]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    register_datasets(small_config("retinanet", "DATASETS.COCO", str([[str(path), str(path), str(tmp_path)]])))
    assert known_categories(None, None, number=3, datasets=[str(path)]) == Categories((2, 11, 30), ("b", "a", "c"))
    assert known_categories(("a",) * 3, None, number=3, datasets=[str(path)]).ids == (1, 2, 3)


def test_categories_of_a_loaded_detector(shapes, tmp_path):
    """The classes are the file's; with ``as_datasets`` the model's rows follow the order of the config's datasets."""
    cfg, elsewhere = small_config(), small_config("retinanet", "DATASETS.TEST", "()", "DATASETS.TRAIN", "()")
    state = untrained_detector(cfg).state_dict()
    own = Categories((30, 10, 20), ("triangle", "circle", "square"))
    metadata = CheckpointMetadata(cfg.MODEL.TRANSFORMER.VARIANT, classes=own.names, category_ids=own.ids)
    path = save(tmp_path, {"model": state, METADATA_KEY: metadata.to_dict()})
    rows = state["head.cls_score.bias"].view(-1, 3)
    for config, options, expected, order in (
        (elsewhere, {}, own, [0, 1, 2]),
        (cfg, {}, Categories((10, 20, 30), SHAPES.names), [1, 2, 0]),
        (cfg, {"as_datasets": False}, own, [0, 1, 2]),
    ):
        model, categories = load_detector(config, path, **options)
        assert categories == expected
        assert torch.equal(model.state_dict()["head.cls_score.bias"].view(-1, 3), rows[:, order])
    path = save(tmp_path, {"model": state})
    assert load_detector(cfg, path)[1] == SHAPES
    assert load_detector(elsewhere, path)[1].names == ("class 1", "class 2", "class 3")


# Rows


@pytest.fixture
def named(tmp_path):
    """A config whose datasets have classes of the given names."""

    def make(name: str, classes, *overrides: str):
        stem = f"{tmp_path.name}-{'-'.join(classes)}"
        if name == "semantic_fpn":
            path = tmp_path / f"{stem}.txt"
            path.write_text("\n".join(classes))
            dataset = ["DATASETS.ADE20K", str([[stem, str(tmp_path), str(tmp_path), str(path)]])]
        else:
            path = tmp_path / f"{stem}.json"
            categories = [{"id": 10 + index, "name": text} for index, text in enumerate(classes)]
            path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories[::-1]}))
            dataset = ["DATASETS.COCO", str([[stem, str(path), str(tmp_path)]])]
        dataset += ["DATASETS.TRAIN", f"('{stem}',)", "DATASETS.TEST", f"('{stem}',)"]
        cfg = small_config(name, NUM_CLASSES[name], str(len(classes)), *dataset, *overrides)
        register_datasets(cfg)
        return cfg

    return make


def saved_for(folder, name: str, classes, *overrides: str) -> tuple[str, dict]:
    """Save a detector with metadata that name its classes."""
    state = detector(name, NUM_CLASSES[name], str(len(classes)), *overrides, seed=7).state_dict()
    metadata = CheckpointMetadata(variant="vil_tiny_1_1_3_1_rpb", classes=tuple(classes)).to_dict()
    return save(folder, {"model": state, METADATA_KEY: metadata}), state


def load(path: str, cfg, **options) -> tuple[dict, dict, list[str]]:
    """Return the weights before and after loading, and the log; the check on the meta device passes as well."""
    check_weights(cfg, path, **options)
    model = untrained_detector(cfg)
    before = copy_of(model)
    with log_of(LOG) as log:
        Checkpointer(model, cfg=cfg, **options).load(path)
    return before, model.state_dict(), log.output


def class_rows(key: str, tensor: torch.Tensor, number: int) -> list[torch.Tensor] | None:
    """Return the rows of each class, and of the background; None for a parameter without rows per class."""
    if key.startswith("head.cls_score"):
        return list(tensor.unflatten(0, (9, number)).transpose(0, 1))
    if "bbox_pred" in key and len(tensor) == 4 * number and "box_predictor" in key:
        return list(tensor.unflatten(0, (number, 4)))
    has_rows = ("box_predictor" in key and "cls_score" in key) or ("predictor" in key and len(tensor) == number)
    return list(tensor) if has_rows else None


@pytest.mark.parametrize("name, overrides", [*((name, []) for name in NUM_CLASSES), ("mask_rcnn", AGNOSTIC)])
def test_rows_of_matching_names_are_copied(tmp_path, named, name, overrides):
    path, theirs = saved_for(tmp_path, name, THEIRS, *overrides)
    before, after, log = load(path, named(name, OURS, *overrides))
    matched = 0
    for key in after:
        ours, their_rows = class_rows(key, after[key], 4), class_rows(key, theirs[key], 3)
        if ours is None or their_rows is None:
            assert torch.equal(after[key], theirs[key]), key
            continue
        random = class_rows(key, before[key], 4)
        # The last row may be the background.
        expected = [their_rows[2], random[1], their_rows[0], random[3], *their_rows[3:]]
        assert all(map(torch.equal, ours, expected)) and len(ours) == len(expected), key
        matched += 1
    cascade = {"retinanet": 2, "semantic_fpn": 2, "mask_rcnn": 2 if overrides else 6, "cascade_mask_rcnn": 8}
    assert matched == cascade[name]
    assert sum("2 of 4 (person, cat)" in text and "zebra, bird" in text for text in log) == 1


def test_the_same_classes_in_another_order(tmp_path, named):
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS)
    for complete in (False, True):
        _, after, _ = load(path, named("mask_rcnn", THEIRS[::-1]), complete=complete)
        key = "roi_heads.box_predictor.cls_score.weight"
        assert torch.equal(after[key], theirs[key][[2, 1, 0, 3]])
    _, after, log = load(path, named("mask_rcnn", THEIRS))
    assert equal(after, theirs) == set(theirs) and not any("matched" in text for text in log)


def test_a_dataset_with_another_number_of_classes_is_ignored(tmp_path, named):
    """Nine anchors of four classes have as many rows as twelve of three."""
    path, theirs = saved_for(tmp_path, "retinanet", (*THEIRS, "zebra"))
    cfg = named("retinanet", THEIRS).clone()
    cfg.defrost()
    cfg.MODEL.RETINANET.NUM_CLASSES = 4
    assert equal(load(path, cfg)[1], theirs) == set(theirs)


def test_evaluation_with_other_classes(tmp_path, named, caplog):
    """Classes match by index if only names differ; in another order, or another number, they would be confused."""
    path, theirs = saved_for(tmp_path, "retinanet", THEIRS)
    _, after, _ = load(path, named("retinanet", ("cat", "dog", "human")), complete=True)
    assert equal(after, theirs) == set(theirs) and "human" in caplog.text
    for classes, unmatched in ((("dog", "cat", "human"), "human"), (("person", "wolf", "lion"), "wolf"), (OURS, "4")):
        with pytest.raises(ConfigError, match=unmatched):
            load(path, named("retinanet", classes), complete=True)
    before, after, _ = load(path, named("retinanet", ("dog", "cat", "human")))
    assert set(before) - equal(before, after)
