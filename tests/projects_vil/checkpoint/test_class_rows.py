"""Rows of classes of the same name: by hand for the predictors of all three heads."""

import json

import pytest
import torch

from backbones import InputError
from projects_vil.checkpoint import PROVENANCE_KEY, Checkpointer, Provenance, check_weights
from projects_vil.checkpoint.class_rows import copy_rows, is_predictor, match_classes, rows_of_classes
from projects_vil.data import register_datasets
from tests.backbones.official import official_state_dict
from tests.projects_vil.checkpoint.test_detection_checkpoint import detector, equal, log_of, save
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except
from tests.wrapping import detectron2_detector

LOG = "fvcore.common.checkpoint"
THEIRS = ("cat", "dog", "person")
OURS = ("person", "zebra", "cat", "bird")
BOX, MASK = "roi_heads.box_predictor", "roi_heads.mask_head.predictor"
NUM_CLASSES = {
    "retinanet": "MODEL.RETINANET.NUM_CLASSES",
    "mask_rcnn": "MODEL.ROI_HEADS.NUM_CLASSES",
    "semantic_fpn": "MODEL.SEM_SEG_HEAD.NUM_CLASSES",
}


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
            # detectron2 numbers them by id, in whatever order they come.
            categories = [{"id": 10 + index, "name": text} for index, text in enumerate(classes)]
            path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories[::-1]}))
            dataset = ["DATASETS.COCO", str([[stem, str(path), str(tmp_path)]])]
        dataset += ["DATASETS.TRAIN", f"('{stem}',)", "DATASETS.TEST", f"('{stem}',)"]
        cfg = small_config(name, NUM_CLASSES[name], str(len(classes)), *dataset, *overrides)
        register_datasets(cfg)
        return cfg

    return make


def saved_for(folder, name: str, classes, *overrides: str) -> tuple[str, dict]:
    """A detector's file that says which classes it is for."""
    state = detector(name, NUM_CLASSES[name], str(len(classes)), *overrides, seed=7).state_dict()
    said = Provenance(variant="vil_tiny_1_1_3_1_rpb", classes=tuple(classes)).to_dict()
    return save(folder, {"model": state, PROVENANCE_KEY: said}), state


def load(path: str, cfg, name: str, *overrides: str, **options) -> tuple[dict, dict, list[str]]:
    """State before and after, and the log; the check before a run, without values, finds nothing wrong."""
    check_weights(cfg, path, **options)
    model = detector(name, NUM_CLASSES[name], str(_number(cfg, name)), *overrides)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with log_of(LOG) as log:
        Checkpointer(model, cfg=cfg, **options).load(path)
    return before, model.state_dict(), log


def _number(cfg, name: str) -> int:
    node = cfg
    for part in NUM_CLASSES[name].split("."):
        node = node[part]
    return node


# -- rows ------------------------------------------------------------------------------------------


def test_rows_by_hand():
    # Two anchors of three classes: detectron2 views the channels as (A, K).
    assert rows_of_classes("head.cls_score.weight", 6, 3).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert rows_of_classes(f"{BOX}.cls_score.bias", 4, 3).tolist() == [[0], [1], [2], [3]]
    assert rows_of_classes(f"{BOX}.bbox_pred.weight", 8, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of_classes(f"{MASK}.weight", 3, 3).tolist() == [[0], [1], [2]]
    assert rows_of_classes("sem_seg_head.predictor.bias", 2, 2).tolist() == [[0], [1]]
    # A cascade's are numbered, and their boxes are those of all classes.
    assert rows_of_classes(f"{BOX}.2.cls_score.bias", 4, 3).tolist() == [[0], [1], [2], [3]]
    assert rows_of_classes(f"{BOX}.2.bbox_pred.weight", 4, 3) is None
    assert rows_of_classes(f"{BOX}.2.bbox_pred.weight", 4, 1) is None


@pytest.mark.parametrize(
    "name, rows, classes",
    [
        ("head.cls_score.weight", 7, 3),
        (f"{BOX}.cls_score.weight", 3, 3),
        (f"{BOX}.bbox_pred.weight", 4, 3),  # class-agnostic
        (f"{MASK}.weight", 1, 3),  # class-agnostic
        ("head.bbox_pred.weight", 12, 3),
        ("backbone.fpn_output3.weight", 3, 3),
    ],
)
def test_no_rows_of_classes(name, rows, classes):
    assert rows_of_classes(name, rows, classes) is None


def test_predictors():
    assert is_predictor("head.cls_score.weight") and is_predictor(f"{MASK}.bias")
    assert not is_predictor("head.bbox_pred.weight") and not is_predictor("roi_heads.mask_head.deconv.weight")


def test_names_match_once():
    assert match_classes(OURS, THEIRS) == {0: 2, 2: 0}
    assert match_classes(("a", "a", "b"), ("b", "a")) == {2: 0}
    assert match_classes(("a", "b"), ("a", "a", "b")) == {1: 2}


def test_copy_leaves_both_as_they_are():
    ours, theirs = torch.zeros(3), torch.arange(1.0, 3)
    options = {"matched": {2: 0}, "our_number": 3, "their_number": 2}
    assert copy_rows(f"{MASK}.bias", ours, theirs, **options).tolist() == [0, 0, 1]
    assert ours.tolist() == [0, 0, 0] and theirs.tolist() == [1, 2]
    assert copy_rows(f"{MASK}.bias", ours[:, None], theirs, **options) is None
    # Anchors of another number
    options = {"matched": {0: 0}, "our_number": 3, "their_number": 3}
    assert copy_rows("head.cls_score.bias", torch.zeros(6), torch.zeros(9), **options) is None


# -- detectors -------------------------------------------------------------------------------------


def test_retinanet_by_hand(tmp_path, named):
    path, theirs = saved_for(tmp_path, "retinanet", THEIRS)
    before, after, log = load(path, named("retinanet", OURS), "retinanet")
    for leaf in ("weight", "bias"):
        key = f"head.cls_score.{leaf}"
        for anchor in range(9):
            row = 4 * anchor
            assert torch.equal(after[key][row], theirs[key][3 * anchor + 2])  # person
            assert torch.equal(after[key][row + 1], before[key][row + 1])  # zebra
            assert torch.equal(after[key][row + 2], theirs[key][3 * anchor])  # cat
            assert torch.equal(after[key][row + 3], before[key][row + 3])  # bird
    assert all(torch.equal(after[key], theirs[key]) for key in after if not key.startswith("head.cls_score"))
    expected = "classes matched by name: 2 of 4 (person, cat) in head.cls_score.weight, head.cls_score.bias"
    assert f"{expected}; these start anew: zebra, bird" in log


def test_mask_rcnn_by_hand(tmp_path, named):
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS)
    before, after, log = load(path, named("mask_rcnn", OURS), "mask_rcnn")
    for leaf in ("weight", "bias"):
        scores, boxes, masks = f"{BOX}.cls_score.{leaf}", f"{BOX}.bbox_pred.{leaf}", f"{MASK}.{leaf}"
        expected = [theirs[scores][2], before[scores][1], theirs[scores][0], before[scores][3], theirs[scores][3]]
        assert torch.equal(after[scores], torch.stack(expected))  # the last is the background
        expected = [theirs[boxes][8:], before[boxes][4:8], theirs[boxes][:4], before[boxes][12:]]
        assert torch.equal(after[boxes], torch.cat(expected))
        expected = [theirs[masks][2], before[masks][1], theirs[masks][0], before[masks][3]]
        assert torch.equal(after[masks], torch.stack(expected))
    others = [key for key in after if not is_predictor(key)]
    assert len(others) == len(after) - 6 and all(torch.equal(after[key], theirs[key]) for key in others)
    assert sum("classes matched by name: 2 of 4 (person, cat)" in text for text in log) == 1


def test_semantic_fpn_by_hand(tmp_path, named):
    path, theirs = saved_for(tmp_path, "semantic_fpn", THEIRS)
    before, after, _ = load(path, named("semantic_fpn", OURS), "semantic_fpn")
    for leaf in ("weight", "bias"):
        key = f"sem_seg_head.predictor.{leaf}"
        expected = [theirs[key][2], before[key][1], theirs[key][0], before[key][3]]
        assert torch.equal(after[key], torch.stack(expected))


def test_as_many_classes_in_another_order(tmp_path, named):
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS)
    for complete in (False, True):
        _, after, _ = load(path, named("mask_rcnn", THEIRS[::-1]), "mask_rcnn", complete=complete)
        for leaf in ("weight", "bias"):
            key = f"{BOX}.cls_score.{leaf}"
            assert torch.equal(after[key], theirs[key][[2, 1, 0, 3]])


@pytest.mark.parametrize("name", slow_except(NUM_CLASSES, ["mask_rcnn"]))
def test_the_same_classes_are_loaded_as_they_are(tmp_path, named, name):
    path, theirs = saved_for(tmp_path, name, THEIRS)
    _, after, log = load(path, named(name, THEIRS), name)
    assert all(torch.equal(after[key], theirs[key]) for key in theirs)
    assert not any("matched" in text or "differ" in text for text in log)


def test_class_agnostic_boxes_and_masks_are_for_all_classes(tmp_path, named):
    agnostic = ["MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True", "MODEL.ROI_MASK_HEAD.CLS_AGNOSTIC_MASK", "True"]
    path, theirs = saved_for(tmp_path, "mask_rcnn", THEIRS, *agnostic)
    before, after, _ = load(path, named("mask_rcnn", OURS, *agnostic), "mask_rcnn", *agnostic)
    for key in (f"{BOX}.bbox_pred.weight", f"{MASK}.weight"):
        assert torch.equal(after[key], theirs[key])
    key = f"{BOX}.cls_score.weight"
    assert torch.equal(after[key][[0, 2, 4]], theirs[key][[2, 0, 3]])
    assert torch.equal(after[key][[1, 3]], before[key][[1, 3]])


@pytest.mark.parametrize("name", slow_except(NUM_CLASSES, ["mask_rcnn"]))
def test_without_names_predictors_of_another_number_start_anew(tmp_path, named, name):
    path, theirs = saved_for(tmp_path, name, THEIRS)
    contents = torch.load(path, weights_only=True)
    del contents[PROVENANCE_KEY]
    before, after, log = load(save(tmp_path, contents, "old.pth"), named(name, OURS), name)
    anew = set(after) - equal(after, theirs)
    assert anew and all(is_predictor(key) and torch.equal(after[key], before[key]) for key in anew)
    assert all(any(key in text for text in log) for key in anew)


def test_a_dataset_with_another_number_than_the_model_says_nothing(tmp_path, named):
    """Nine anchors of four classes may be looked at as twelve of three: that would mix them up."""
    path, theirs = saved_for(tmp_path, "retinanet", THEIRS + ("zebra",))
    cfg = named("retinanet", THEIRS).clone()
    cfg.defrost()
    cfg.MODEL.RETINANET.NUM_CLASSES = 4
    _, after, _ = load(path, cfg, "retinanet")
    assert all(torch.equal(after[key], theirs[key]) for key in theirs)


def test_evaluation_with_other_names_warns_and_with_another_number_raises(tmp_path, named):
    path, theirs = saved_for(tmp_path, "retinanet", THEIRS)
    _, after, log = load(path, named("retinanet", ("cat", "dog", "human")), "retinanet", complete=True)
    assert all(torch.equal(after[key], theirs[key]) for key in theirs)
    assert any("1 names differ, and classes are taken by number" in text for text in log)
    with pytest.raises(InputError) as caught:
        load(path, named("retinanet", OURS), "retinanet", complete=True)
    assert "was trained for 3 classes, cat, dog, person, and the datasets have 4 classes, person" in str(caught.value)


@pytest.mark.parametrize("name", slow_except(NUM_CLASSES, ["mask_rcnn"]))
def test_evaluation_with_another_order_and_another_name_raises(tmp_path, named, name):
    """By number two classes would score as each other; by name one would have no rows."""
    path, _ = saved_for(tmp_path, name, THEIRS)
    for classes, first in ((("dog", "cat", "human"), "human"), (("person", "wolf", "lion"), "wolf")):
        for check in (check_weights, lambda cfg, path, **kw: load(path, cfg, name, **kw)):
            with pytest.raises(InputError) as caught:
                check(named(name, classes), path, complete=True)
            text = str(caught.value)
            assert text.endswith(f"others are in another order, and {first} here matches no name in it")
            assert "\n" not in text and path in text
    # To start training, rows go by name.
    before, after, _ = load(path, named(name, ("dog", "cat", "human")), name)
    assert any(not torch.equal(before[key], after[key]) for key in after if is_predictor(key))


def test_coco_classes_of_an_official_detector(tmp_path, named):
    """Its predictors are for 80 classes, whose names are known: a detector of three of them starts with their rows."""
    deep = ["MODEL.RETINANET.NUM_CONVS", "4"]
    weights = official_state_dict(relative_bias=True)
    trained = detector("retinanet", *deep, "MODEL.RETINANET.NUM_CLASSES", "80", seed=7).state_dict()
    heads = {key: tensor for key, tensor in trained.items() if not key.startswith("backbone.bottom_up.")}
    path = save(tmp_path, detectron2_detector(weights, heads))
    cfg = named("retinanet", ("car", "unicorn", "person"), *deep)
    _, after, log = load(path, cfg, "retinanet", *deep)
    key = "head.cls_score.weight"
    for anchor in range(9):
        assert torch.equal(after[key][3 * anchor], trained[key][80 * anchor + 2])  # car
        assert torch.equal(after[key][3 * anchor + 2], trained[key][80 * anchor])  # person
    assert any("2 of 3 (car, person)" in text and "start anew: unicorn" in text for text in log)
