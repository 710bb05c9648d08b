"""Classes of a model: ids and names from files and datasets, and rows of predictors matched by name."""

import json

import pytest
import torch

from backbones import ConfigError
from projects_vil.checkpoint import (
    METADATA_KEY,
    Categories,
    Checkpointer,
    CheckpointMetadata,
    check_weights,
    checked_ids,
    dataset_categories,
    known_categories,
    load_detector,
)
from projects_vil.checkpoint.categories import copy_rows, is_predictor, match_classes
from projects_vil.data import register_datasets
from tests.backbones.official import official_state_dict
from tests.projects_vil.checkpoint.test_checkpointer import LOG, detector, equal, log_of, save
from tests.projects_vil.helpers import small_config, untrained_detector
from tests.selection import slow_except
from tests.wrapping import detectron2_detector

SHAPES = Categories((1, 2, 3), ("circle", "square", "triangle"))
THEIRS = ("cat", "dog", "person")
OURS = ("person", "zebra", "cat", "bird")
BOX, MASK = "roi_heads.box_predictor", "roi_heads.mask_head.predictor"
NUM_CLASSES = {
    "retinanet": "MODEL.RETINANET.NUM_CLASSES",
    "mask_rcnn": "MODEL.ROI_HEADS.NUM_CLASSES",
    "semantic_fpn": "MODEL.SEM_SEG_HEAD.NUM_CLASSES",
}


# Ids and names


def test_known_categories(shapes):
    for datasets in ((), ("shapes_val",), ("absent",)):
        known = known_categories(SHAPES.names, (9, 4, 6), number=3, datasets=datasets)
        assert known == Categories((9, 4, 6), SHAPES.names)
        assert (known.colors is not None) == (datasets == ("shapes_val",))
    assert known_categories(SHAPES.names, None, number=3, datasets=("absent", "shapes_val")) == SHAPES
    for unnamed in (None, ("0", "1", "2")):
        assert known_categories(unnamed, None, number=3, datasets=("shapes_val",)) == SHAPES
        assert known_categories(unnamed, None, number=3).names == ("class 1", "class 2", "class 3")
    assert known_categories(("a", "b", "c"), None, number=3) == Categories((1, 2, 3), ("a", "b", "c"))
    # With ids, numbers are names, as in data sets of digits.
    assert known_categories(("7", "8", "9"), (1, 2, 3), number=3, datasets=("shapes_val",)).names == ("7", "8", "9")


def test_categories_of_coco_need_no_file():
    coco = dataset_categories(["coco_2017_val"], 80)
    assert coco.ids[11:13] == (13, 14) and coco.names[79] == "toothbrush"
    known = known_categories(coco.names, None, number=80)
    assert known == coco and len(known.colors) == 80


def test_categories_of_a_dataset_are_sorted_by_id(tmp_path):
    categories = [{"id": 30, "name": "c"}, {"id": 2, "name": "b"}, {"id": 11, "name": "a"}]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    register_datasets(small_config("retinanet", "DATASETS.COCO", str([[str(path), str(path), str(tmp_path)]])))
    assert dataset_categories([str(path)], 3) == Categories((2, 11, 30), ("b", "a", "c"))
    assert dataset_categories([str(path)], 4) is None and dataset_categories([str(path)], 3, names=("a",) * 3) is None
    path.write_text("{}")
    assert dataset_categories([str(path)], 3) is None


def test_checked_ids():
    assert checked_ids([3, 1], ("a", "b")) == (3, 1) and checked_ids([3, 1], None) is None
    for ids in ([3, 3], [3], [3, "1"], [3, True], "31", None):
        assert checked_ids(ids, ("a", "b")) is None


def test_categories_of_a_loaded_detector(shapes, tmp_path):
    """The classes are the file's; with ``as_datasets`` the model's rows follow the order of the config's datasets."""
    cfg, elsewhere = small_config(), small_config("retinanet", "DATASETS.TEST", "()", "DATASETS.TRAIN", "()")
    state = untrained_detector(cfg).state_dict()

    def saved(**fields) -> str:
        metadata = CheckpointMetadata(variant=cfg.MODEL.TRANSFORMER.NAME, **fields).to_dict()
        return save(tmp_path, {"model": state, METADATA_KEY: metadata})

    path = saved(classes=("triangle", "circle", "square"), category_ids=(30, 10, 20))
    own = Categories((30, 10, 20), ("triangle", "circle", "square"))
    rows = state["head.cls_score.bias"].view(-1, 3)
    for config, options, expected, order in (
        (elsewhere, {}, own, [0, 1, 2]),
        (cfg, {}, Categories((10, 20, 30), SHAPES.names), [1, 2, 0]),
        (cfg, {"as_datasets": False}, own, [0, 1, 2]),
    ):
        model, categories = load_detector(config, path, **options)
        assert categories == expected
        assert torch.equal(model.state_dict()["head.cls_score.bias"].view(-1, 3), rows[:, order])
    for fields in ({}, {"classes": SHAPES.names}):
        assert load_detector(cfg, saved(**fields))[1] == SHAPES
    assert load_detector(elsewhere, saved())[1].names == ("class 1", "class 2", "class 3")


# Rows


def test_names_match_once():
    assert match_classes(OURS, THEIRS) == {0: 2, 2: 0}
    assert match_classes(("a", "a", "b"), ("b", "a")) == {2: 0}
    assert match_classes(("a", "b"), ("a", "a", "b")) == {1: 2}


@pytest.mark.parametrize(
    "name, ours, theirs, numbers, expected",
    [
        # Two anchors of three classes from two anchors of two: detectron2 views the channels as (A, K).
        ("head.cls_score.bias", 6, 4, (3, 2), [0, 0, 1, 0, 0, 3]),
        (f"{BOX}.cls_score.bias", 4, 3, (3, 2), [0, 0, 1, 3]),
        (f"{BOX}.bbox_pred.bias", 12, 8, (3, 2), [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]),
        (f"{MASK}.bias", 3, 2, (3, 2), [0, 0, 1]),
        ("sem_seg_head.predictor.bias", 3, 2, (3, 2), [0, 0, 1]),
        (f"{BOX}.2.cls_score.bias", 4, 3, (3, 2), [0, 0, 1, 3]),
        # A cascade, and class-agnostic predictors, have no rows per class; nor has another number of anchors.
        (f"{BOX}.2.bbox_pred.bias", 4, 4, (3, 2), None),
        (f"{BOX}.bbox_pred.bias", 4, 4, (3, 2), None),
        (f"{MASK}.bias", 1, 1, (3, 2), None),
        ("head.cls_score.bias", 6, 6, (3, 2), None),
        ("head.bbox_pred.bias", 12, 8, (3, 2), None),
    ],
)
def test_copied_rows(name, ours, theirs, numbers, expected):
    start, source = torch.zeros(ours), torch.arange(1.0, theirs + 1)
    copied = copy_rows(name, start, source, matched={2: 0}, our_number=numbers[0], their_number=numbers[1])
    assert (copied if copied is None else copied.tolist()) == expected
    assert not start.any()


# Detectors


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


def load(path: str, cfg, name: str, *overrides: str, **options) -> tuple[dict, dict, list[str]]:
    """Return the weights before and after loading, and the log; the check on the meta device passes as well."""
    check_weights(cfg, path, **options)
    node = cfg
    for part in NUM_CLASSES[name].split("."):
        node = node[part]
    model = detector(name, NUM_CLASSES[name], str(node), *overrides)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with log_of(LOG) as log:
        Checkpointer(model, cfg=cfg, **options).load(path)
    return before, model.state_dict(), log


@pytest.mark.parametrize("name", NUM_CLASSES)
def test_rows_of_matching_names_are_copied(tmp_path, named, name):
    path, theirs = saved_for(tmp_path, name, THEIRS)
    before, after, log = load(path, named(name, OURS), name)
    for leaf in ("weight", "bias"):
        if name == "retinanet":
            key = f"head.cls_score.{leaf}"
            rows = [(torch.stack((theirs[key][3 * a + 2], before[key][4 * a + 1], theirs[key][3 * a],
                                  before[key][4 * a + 3]))) for a in range(9)]  # fmt: skip
            expected = {key: torch.cat(rows)}
        elif name == "semantic_fpn":
            key = f"sem_seg_head.predictor.{leaf}"
            expected = {key: torch.stack([theirs[key][2], before[key][1], theirs[key][0], before[key][3]])}
        else:
            scores, boxes, masks = f"{BOX}.cls_score.{leaf}", f"{BOX}.bbox_pred.{leaf}", f"{MASK}.{leaf}"
            per_class = [theirs[scores][2], before[scores][1], theirs[scores][0], before[scores][3]]
            expected = {
                scores: torch.stack([*per_class, theirs[scores][3]]),  # the last row is background
                boxes: torch.cat([theirs[boxes][8:], before[boxes][4:8], theirs[boxes][:4], before[boxes][12:]]),
                masks: torch.stack([theirs[masks][2], before[masks][1], theirs[masks][0], before[masks][3]]),
            }
        for key, tensor in expected.items():
            assert torch.equal(after[key], tensor), key
    others = [key for key in after if not is_predictor(key)]
    assert set(others) <= equal(after, theirs)
    assert sum("2 of 4 (person, cat)" in text and "zebra, bird" in text for text in log) == 1


def test_the_same_classes_in_another_order(tmp_path, named):
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS)
    for complete in (False, True):
        _, after, _ = load(path, named("mask_rcnn", THEIRS[::-1]), "mask_rcnn", complete=complete)
        for leaf in ("weight", "bias"):
            key = f"{BOX}.cls_score.{leaf}"
            assert torch.equal(after[key], theirs[key][[2, 1, 0, 3]])
    _, after, log = load(path, named("mask_rcnn", THEIRS), "mask_rcnn")
    assert equal(after, theirs) == set(theirs) and not any("matched" in text for text in log)


def test_class_agnostic_boxes_and_masks_are_kept(tmp_path, named):
    agnostic = ["MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True", "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"]
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS, *agnostic)
    before, after, _ = load(path, named("mask_rcnn", OURS, *agnostic), "mask_rcnn", *agnostic)
    for key in (f"{BOX}.bbox_pred.weight", f"{MASK}.weight"):
        assert torch.equal(after[key], theirs[key])
    key = f"{BOX}.cls_score.weight"
    assert torch.equal(after[key][[0, 2, 4]], theirs[key][[2, 0, 3]])
    assert torch.equal(after[key][[1, 3]], before[key][[1, 3]])


@pytest.mark.parametrize("name", slow_except(NUM_CLASSES, ["mask_rcnn"]))
def test_without_names_predictors_of_another_number_stay_random(tmp_path, named, name):
    path, theirs = saved_for(tmp_path, name, THEIRS)
    contents = torch.load(path, weights_only=True)
    del contents[METADATA_KEY]
    before, after, log = load(save(tmp_path, contents, "old.pth"), named(name, OURS), name)
    random = set(after) - equal(after, theirs)
    assert random and all(is_predictor(key) and torch.equal(after[key], before[key]) for key in random)
    assert all(any(key in text for text in log) for key in random)


def test_a_dataset_with_another_number_of_classes_is_ignored(tmp_path, named):
    """Nine anchors of four classes have as many rows as twelve of three."""
    path, theirs = saved_for(tmp_path, "retinanet", (*THEIRS, "zebra"))
    cfg = named("retinanet", THEIRS).clone()
    cfg.defrost()
    cfg.MODEL.RETINANET.NUM_CLASSES = 4
    assert equal(load(path, cfg, "retinanet")[1], theirs) == set(theirs)


@pytest.mark.parametrize("name", slow_except(NUM_CLASSES, ["retinanet"]))
def test_evaluation_with_other_classes(tmp_path, named, name):
    """Classes match by index if only names differ; in another order, or another number, they would be confused."""
    path, theirs = saved_for(tmp_path, name, THEIRS)
    _, after, log = load(path, named(name, ("cat", "dog", "human")), name, complete=True)
    assert equal(after, theirs) == set(theirs) and any("human" in text for text in log)
    for classes, unmatched in ((("dog", "cat", "human"), "human"), (("person", "wolf", "lion"), "wolf"), (OURS, "4")):
        for check in (check_weights, lambda cfg, path, **kw: load(path, cfg, name, **kw)):
            with pytest.raises(ConfigError, match=unmatched) as caught:
                check(named(name, classes), path, complete=True)
            assert "\n" not in str(caught.value) and path in str(caught.value)
    before, after, _ = load(path, named(name, ("dog", "cat", "human")), name)
    assert set(before) - equal(before, after)


def test_rows_of_an_official_detector_match_coco_names(tmp_path, named):
    deep = ["MODEL.RETINANET.NUM_CONVS", "4"]
    weights = official_state_dict(relative_bias=True)
    trained = detector("retinanet", *deep, "MODEL.RETINANET.NUM_CLASSES", "80", seed=7).state_dict()
    heads = {key: tensor for key, tensor in trained.items() if not key.startswith("backbone.bottom_up.")}
    path = save(tmp_path, detectron2_detector(weights, heads))
    _, after, log = load(path, named("retinanet", ("car", "unicorn", "person"), *deep), "retinanet", *deep)
    key = "head.cls_score.weight"
    for anchor in range(9):
        assert torch.equal(after[key][3 * anchor], trained[key][80 * anchor + 2])  # car
        assert torch.equal(after[key][3 * anchor + 2], trained[key][80 * anchor])  # person
    assert any("2 of 3 (car, person)" in text and "unicorn" in text for text in log)
