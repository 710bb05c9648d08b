"""Weights that fit, those that fit in part as allowed, and one clear line for all others."""

import contextlib
import functools
import logging
import pickle

import pytest
import torch
from detectron2.modeling import build_model
from safetensors.torch import save_file
from torch import nn

from backbones import InputError
from backbones.utils.files import read_checkpoint
from projects_vil.checkpoint import Checkpointer
from tests.projects_vil.helpers import small_config

State = dict[str, torch.Tensor]


def detector(name: str = "retinanet", *overrides: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(small_config(name, *overrides))


@functools.cache
def trained(name: str = "retinanet") -> State:
    """The weights of a detector that no other detector in this file starts with."""
    return detector(name, seed=7).state_dict()


def save(folder, state, name: str = "weights.pth") -> str:
    torch.save(state, folder / name)
    return str(folder / name)


def load(path: str, *overrides: str, name: str = "retinanet") -> tuple[State, State]:
    """The weights of a detector before and after loading."""
    model = detector(name, *overrides)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    Checkpointer(model).load(path)
    return before, model.state_dict()


def changed(before: State, after: State) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def equal(state: State, other: State) -> set[str]:
    return {name for name in state if name in other and torch.equal(state[name], other[name])}


def message(path, *overrides: str, name: str = "retinanet") -> str:
    with pytest.raises(InputError) as caught:
        load(str(path), *overrides, name=name)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def log_of(name: str):
    """What a logger is told; detectron2 keeps its records from pytest's own handler."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- what fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_round_trip(tmp_path, name):
    saved = detector(name, seed=7)
    Checkpointer(saved, str(tmp_path)).save("saved", iteration=3)
    model = detector(name)
    rest = Checkpointer(model).load(str(tmp_path / "saved.pth"))
    assert equal(model.state_dict(), saved.state_dict()) == set(saved.state_dict())
    assert rest["iteration"] == 3


@pytest.mark.parametrize("wrap", [False, True])
def test_bare_state_dict_and_one_below_model(tmp_path, wrap):
    _, after = load(save(tmp_path, {"model": trained()} if wrap else trained()))
    assert equal(after, trained()) == set(trained())


def test_safetensors(tmp_path):
    save_file(trained(), tmp_path / "weights.safetensors")
    _, after = load(str(tmp_path / "weights.safetensors"))
    assert equal(after, trained()) == set(trained())


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_a_backbones_weights_fill_the_backbone_and_the_rest_is_named(tmp_path, name):
    backbone = {key: tensor for key, tensor in trained().items() if key.startswith("backbone.bottom_up.")}
    with log_of("fvcore.common.checkpoint") as log:
        before, after = load(save(tmp_path, backbone), name=name)
    below = {key for key in after if key.startswith("backbone.bottom_up.")}
    assert below and below <= equal(after, trained())
    assert changed(before, after) <= below
    assert any("backbone.fpn_lateral3" in text for text in log)


def test_no_weights_at_all_leave_the_model_as_it_is():
    before, after = load("")
    assert changed(before, after) == set()


@pytest.mark.parametrize(
    "name, overrides, predictors",
    [
        ("retinanet", ["MODEL.RETINANET.NUM_CLASSES", "5"], ["head.cls_score"]),
        ("semantic_fpn", ["MODEL.SEM_SEG_HEAD.NUM_CLASSES", "5"], ["sem_seg_head.predictor"]),
        (
            "mask_rcnn",
            ["MODEL.ROI_HEADS.NUM_CLASSES", "5"],
            [f"roi_heads.{x}" for x in ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_head.predictor")],
        ),
    ],
)
def test_another_number_of_classes_starts_only_the_predictors_anew(tmp_path, name, overrides, predictors):
    with log_of("fvcore.common.checkpoint") as log:
        before, after = load(save(tmp_path, trained(name)), *overrides, name=name)
    anew = {f"{layer}.{kind}" for layer in predictors for kind in ("weight", "bias")}
    assert set(after) - equal(after, trained(name)) == anew
    assert all(torch.equal(before[key], after[key]) for key in anew)
    assert all(any(key in text for text in log) for key in anew)


def test_a_whole_model_is_complete(tmp_path):
    model = detector()
    Checkpointer(model, complete=True).load(save(tmp_path, trained()))
    assert equal(model.state_dict(), trained()) == set(trained())


# -- what does not ---------------------------------------------------------------------------------


def test_weights_of_another_variant(tmp_path):
    path = save(tmp_path, trained())
    assert "shapes differ" in message(path, "MODEL.TRANSFORMER.NAME", "vil_small_1_1_9_1_rpb")
    assert "names in it fit nothing" in message(path, "MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1")
    assert " 0 names in it fit nothing and 108 param" in message(path, "MODEL.TRANSFORMER.NAME", "vil_tiny_rpb")


def test_weights_with_other_fpn_channels(tmp_path):
    text = message(save(tmp_path, trained()), "MODEL.FPN.OUT_CHANNELS", "16")
    assert "shapes differ" in text and "(32, 96, 1, 1) there and (16, 96, 1, 1) here" in text


def test_weights_of_another_detector(tmp_path):
    assert "of another model" in message(save(tmp_path, trained()), name="mask_rcnn")
    assert "of another model" in message(save(tmp_path, trained("mask_rcnn")))


@pytest.mark.parametrize("part", ["backbone.bottom_up.", "backbone.fpn", "head."])
def test_half_of_a_parts_weights(tmp_path, part):
    keys = [key for key in trained() if key.startswith(part)]
    lost = keys[: len(keys) // 2]
    state = {key: tensor for key, tensor in trained().items() if key not in lost}
    text = message(save(tmp_path, state))
    assert f"{len(lost)} parameters of the model are not in it" in text
    assert any(key in text for key in lost)


def test_one_renamed_weight(tmp_path):
    state = dict(trained())
    state["head.cls_scor.weight"] = state.pop("head.cls_score.weight")
    text = message(save(tmp_path, state))
    assert text.endswith(
        "1 names in it fit nothing, such as head.cls_scor.weight and 1 parameters of the model are not in it, such as "
        "head.cls_score.weight"
    )


def test_one_weight_too_many(tmp_path):
    text = message(save(tmp_path, trained() | {"head.extra.weight": torch.ones(2)}))
    assert "1 names in it fit nothing, such as head.extra.weight and 0 parameters" in text


def test_both_sides_of_a_mismatch_are_listed_and_cut(tmp_path):
    prefix = "backbone.bottom_up.net.stages.0"
    state = {name.replace(prefix, f"{prefix}0"): tensor for name, tensor in trained().items()}
    number = sum(name.startswith(prefix) for name in trained())
    text = message(save(tmp_path, state))
    for side, counted in ((f"{prefix}0.", "names in it fit nothing"), (f"{prefix}.", "parameters of the model")):
        assert f"{number} {counted}" in text and text.count(side) == 3
    assert text.count(f"and {number - 3} more") == 2


@pytest.mark.parametrize("complete", [False, True])
def test_only_the_rows_of_a_predictor_may_differ(tmp_path, complete):
    key = "head.cls_score.weight"
    narrow = trained()[key][..., :1, :1].clone()
    for tensor in (narrow, narrow[:9], trained()[key][:, :16].clone(), trained()[key][0].clone()):
        path = save(tmp_path, trained() | {key: tensor})
        with pytest.raises(InputError, match=f"1 shapes differ, {key} is"):
            Checkpointer(detector(), complete=complete).load(path)


def test_weights_without_a_backbone(tmp_path):
    heads = {key: tensor for key, tensor in trained().items() if key.startswith("head.")}
    assert "parameters of the model are not in it, such as backbone.bottom_up" in message(save(tmp_path, heads))


@pytest.mark.parametrize("lost", ["head.", "backbone.fpn"])
def test_a_part_may_not_be_missing_from_a_trained_detector(tmp_path, lost):
    state = {key: tensor for key, tensor in trained().items() if not key.startswith(lost)}
    with pytest.raises(InputError, match=f"parameters of the model are not in it, such as {lost}"):
        Checkpointer(detector(), complete=True).load(save(tmp_path, state))


def test_a_trained_detector_may_not_have_another_number_of_classes(tmp_path):
    model = detector("retinanet", "MODEL.RETINANET.NUM_CLASSES", "5")
    with pytest.raises(InputError, match="shapes differ, head.cls_score"):
        Checkpointer(model, complete=True).load(save(tmp_path, trained()))


def test_a_trained_detector_has_weights():
    with pytest.raises(InputError, match="no weights were given"):
        Checkpointer(detector(), complete=True).load("")


def test_weights_that_fit_nothing(tmp_path):
    assert "of another model" in message(save(tmp_path, {"module.weight": torch.ones(2)}))


@pytest.mark.parametrize("name", ["absent.pth", "absent.safetensors"])
def test_missing_file(tmp_path, name):
    assert message(tmp_path / name) == f"there is no weights file {tmp_path / name} (MODEL.WEIGHTS)"
    assert message(tmp_path) == f"{tmp_path} is a folder, not a weights file (MODEL.WEIGHTS): name a file in it"


@pytest.mark.parametrize("suffix", ["pth", "pkl", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"MODEL:\n  WEIGHTS: none\n", b"\x80\x04garbage"])
def test_file_of_another_kind(tmp_path, suffix, content):
    path = tmp_path / f"weights.{suffix}"
    path.write_bytes(content)
    message(path)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_truncated_file(tmp_path, suffix):
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save(trained(), path)
    else:
        save_file(trained(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message(path)


@pytest.mark.parametrize(
    "content, hint",
    [
        ([1, 2], "holds a list"),
        ({"epoch": 3}, "no state dict"),
        ({"model": 3}, "no state dict"),
        ({}, "no state dict"),
    ],
)
def test_tensors_that_are_no_model(tmp_path, content, hint):
    assert hint in message(save(tmp_path, content))


class Malicious:
    """Runs ``print(..., file=open(path, "w"))`` where it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("how", ["torch", "torch legacy", "pickle"])
@pytest.mark.parametrize("suffix", ["pth", "pkl", "pyth"])
def test_code_in_a_file_never_runs(tmp_path, how, suffix):
    executed = tmp_path / "executed"
    path = tmp_path / f"weights.{suffix}"
    content = {"model": trained(), "__author__": Malicious(executed)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    message(path)
    with pytest.raises(InputError):
        read_checkpoint(path)
    assert not executed.exists()
    if how == "pickle":
        pickle.loads(path.read_bytes())["__author__"].close()
        assert executed.exists()
