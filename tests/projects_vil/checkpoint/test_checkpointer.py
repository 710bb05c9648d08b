"""Files that load, files that load partially, and files that raise an error with their name."""

import copy
import functools
import shutil
import unittest
from pathlib import Path

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from safetensors.torch import save_file
from torch import nn

from backbones import ConfigError
from projects_vil import load_config
from projects_vil.checkpoint import METADATA_KEY, Checkpointer, check_weights, load_detector
from projects_vil.engine import Trainer
from tests.projects_vil.helpers import SMALL, message, small_config
from tests.selection import slow_except

State = dict[str, torch.Tensor]
LOG = "fvcore.common.checkpoint"
OPTION = "MODEL.TRANSFORMER."
BGR = ["INPUT.FORMAT", "BGR", "MODEL.PIXEL_MEAN", "[103.53, 116.28, 123.675]", "MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"]


@functools.cache
def _built(name: str, *overrides: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(small_config(name, *overrides))


def detector(name: str = "retinanet", *overrides: str, seed: int = 0) -> nn.Module:
    return copy.deepcopy(_built(name, *overrides, seed=seed))


@functools.cache
def trained(name: str = "retinanet") -> State:
    """Return weights that differ from every other detector in this file."""
    return detector(name, seed=7).state_dict()


def save(folder, contents, name: str = "weights.pth") -> str:
    torch.save(contents, folder / name)
    return str(folder / name)


def copy_of(model: nn.Module) -> State:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def load(path: str, *overrides: str, name: str = "retinanet") -> tuple[State, State]:
    """Return the weights of a detector before and after loading."""
    model = detector(name, *overrides)
    before = copy_of(model)
    Checkpointer(model).load(path)
    return before, model.state_dict()


def equal(state: State, other: State) -> set[str]:
    return {name for name in state if name in other and torch.equal(state[name], other[name])}


def error_of(path, *overrides: str, name: str = "retinanet", complete: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        Checkpointer(detector(name, *overrides), complete=complete).load(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def log_of(name: str):
    """Collect a logger's records, which detectron2 keeps from pytest's handler."""
    return unittest.TestCase().assertLogs(name, "INFO")


# Files that match


@pytest.mark.parametrize("name", slow_except(["mask_rcnn", "semantic_fpn"], ["mask_rcnn"]))
def test_round_trip_and_forms_of_a_state_dict(tmp_path, name):
    cfg, state = small_config(name), trained(name)
    saved, loaded = detector(name, seed=7), detector(name)
    Checkpointer(saved, str(tmp_path), cfg=cfg).save("saved", iteration=3)
    assert Checkpointer(loaded, cfg=cfg, complete=True).load(str(tmp_path / "saved.pth"))["iteration"] == 3
    assert equal(loaded.state_dict(), state) == set(state)
    save_file(state, tmp_path / "weights.safetensors")
    wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
    for path in (tmp_path / "weights.safetensors", save(tmp_path, state, "a.pth"), save(tmp_path, wrapped, "b.pth")):
        assert equal(load(str(path), name=name)[1], state) == set(state)


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_weights_of_a_backbone_leave_the_rest_random(tmp_path, name):
    backbone = {key: tensor for key, tensor in trained().items() if key.startswith("backbone.bottom_up.")}
    with log_of(LOG) as log:
        before, after = load(save(tmp_path, backbone), name=name)
    assert backbone and equal(after, trained()) >= backbone.keys()
    assert equal(before, after) >= set(after) - backbone.keys()
    assert any("a backbone only" in text for text in log.output) and "fpn_lateral3" not in "".join(log.output)


@pytest.mark.parametrize(
    "name, key, predictors",
    [
        ("retinanet", "RETINANET", ["head.cls_score"]),
        ("semantic_fpn", "SEM_SEG_HEAD", ["sem_seg_head.predictor"]),
        (
            "mask_rcnn",
            "ROI_HEADS",
            [f"roi_heads.{x}" for x in ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_head.predictor")],
        ),
    ],
)
def test_another_number_of_classes_leaves_only_predictors_random(tmp_path, name, key, predictors):
    overrides, path = [f"MODEL.{key}.NUM_CLASSES", "5"], save(tmp_path, trained(name))
    with log_of(LOG) as log:
        before, after = load(path, *overrides, name=name)
    random = {f"{layer}.{leaf}" for layer in predictors for leaf in ("weight", "bias")}
    assert set(after) - equal(after, trained(name)) == random <= equal(before, after)
    assert all(any(key in text for text in log.output) for key in random)
    assert predictors[0] in error_of(path, *overrides, name=name, complete=True)


# Files that do not match


@pytest.mark.parametrize(
    "overrides, name, named",
    [
        (["MODEL.TRANSFORMER.VARIANT", "vil_small_1_1_9_1_rpb"], "retinanet", "other shapes"),
        (["MODEL.TRANSFORMER.VARIANT", "vil_tiny_rpb"], "retinanet", "108 missing"),
        (["MODEL.FPN.OUT_CHANNELS", "16"], "retinanet", "(32, 96, 1, 1)"),
        ([], "mask_rcnn", "12 unexpected"),
    ],
)
def test_weights_of_another_model(tmp_path, overrides, name, named):
    assert named in error_of(save(tmp_path, trained()), *overrides, name=name)


@pytest.mark.parametrize("part", ["backbone.bottom_up.", "backbone.fpn", "head."])
def test_half_of_a_part_is_missing(tmp_path, part):
    keys = [key for key in trained() if key.startswith(part)]
    state = {key: tensor for key, tensor in trained().items() if key not in keys[: len(keys) // 2]}
    assert f"{len(keys) // 2} missing parameters ({part}" in error_of(save(tmp_path, state))
    without = {key: tensor for key, tensor in trained().items() if not key.startswith(part)}
    assert f" missing parameters ({part}" in error_of(save(tmp_path, without), complete=True)


def test_unexpected_names_values_and_shapes(tmp_path):
    state, key = dict(trained()), "head.cls_score.weight"
    state["head.cls_scor.weight"] = state.pop(key)
    text = error_of(save(tmp_path, state))
    assert "1 unexpected names (head.cls_scor.weight)" in text and f"1 missing parameters ({key})" in text
    weight = trained()[key]
    for value in (weight[..., :1, :1].clone(), weight[0].clone(), 3, torch.full_like(weight, float("nan"))):
        assert key in error_of(save(tmp_path, trained() | {key: value}))
    error_of(save(tmp_path, {"model": 3}))


def test_missing_files(tmp_path):
    for path in (tmp_path / "absent.pth", tmp_path):
        assert "MODEL.WEIGHTS" in error_of(path)
    assert "MODEL.WEIGHTS" in message(Checkpointer(detector(), complete=True).load, "")
    before, after = load("")
    assert equal(before, after) == set(after)


# Metadata


def run_config(trained_run, *overrides: str):
    return load_config(trained_run / "config.yaml", ["OVERWRITE_OUTPUT_DIR", "True", *overrides])


@functools.cache
def contents_of(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def with_metadata(trained_run, folder, name: str = "changed.pth", **metadata) -> str:
    """Save the last checkpoint of the run with other metadata, or without metadata."""
    contents = contents_of(trained_run / "model_final.pth")
    changed = {METADATA_KEY: contents[METADATA_KEY] | metadata} if metadata else {}
    return save(folder, {key: contents[key] for key in contents if key != METADATA_KEY} | changed, name)


def test_metadata_of_a_run(trained_run):
    rest = DetectionCheckpointer(detector()).load(str(trained_run / "model_final.pth"))
    saved = rest[METADATA_KEY]
    assert saved["variant"] == "vil_tiny_1_1_3_1_rpb" and saved["options"] == {}
    assert tuple(saved["classes"]) == ("circle", "square", "triangle") and tuple(saved["category_ids"]) == (1, 2, 3)
    assert saved["input"] == {"format": "RGB", "mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
    assert saved["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "overrides, named, is_fatal",
    [
        ([f"{OPTION}VARIANT", "vil_tiny_rpb"], ["vil_tiny_1_1_3_1_rpb", "vil_tiny_rpb", f"{OPTION}VARIANT"], True),
        ([f"{OPTION}ATTENTION_MODE", "exact"], [f"{OPTION}ATTENTION_MODE zero_pad", "exact"], False),
        ([f"{OPTION}GLOBAL_TOKENS", "[2, 1, 1, 0]"], [f"{OPTION}GLOBAL_TOKENS [1, 1, 1, 0]", "[2, 1, 1, 0]"], True),
        (BGR, ["RGB with mean [123.675", "BGR with mean [103.53", "INPUT.FORMAT"], False),
    ],
)
def test_metadata_that_differ(trained_run, overrides, named, is_fatal):
    """Other options and input formats are an error if the file must have the whole model, otherwise a warning."""
    final, cfg = str(trained_run / "model_final.pth"), run_config(trained_run, *overrides)
    with pytest.raises(ConfigError) as caught:
        check_weights(cfg, final, complete=True)
    assert all(text in str(caught.value) for text in (final, *named, f"{trained_run}/config.yaml"))
    if is_fatal:
        with pytest.raises(ConfigError):
            check_weights(cfg, final)
    else:
        with log_of(LOG) as log:
            Checkpointer(detector("retinanet", *overrides), cfg=cfg).load(final)
        assert any(all(text in line for text in named) for line in log.output)


def test_variants_and_options_where_all_shapes_match(trained_run, tmp_path):
    with pytest.raises(ConfigError, match="ls_tiny.*vil_tiny_1_1_3_1_rpb"):
        check_weights(run_config(trained_run), with_metadata(trained_run, tmp_path, variant="ls_tiny"))
    given = [f"{OPTION}GLOBAL_TOKENS", "[1, 1, 1, 0]", f"{OPTION}CHUNK_SIZE", "[7, 7, 7, 7]"]
    check_weights(run_config(trained_run, *given), str(trained_run / "model_final.pth"), complete=True)
    saved = {"attention_mode": "zero_pad", "global_tokens": [1, 1, 1, 0], "chunk_size": 7, "attention": None}
    for options in (saved, {"no_such_option": 1}, None):
        check_weights(run_config(trained_run), with_metadata(trained_run, tmp_path, options=options), complete=True)


# Resuming


def test_a_resume_without_metadata(trained_run, shapes, tmp_path):
    path = with_metadata(trained_run, tmp_path, "model_0000003.pth")
    assert set(load_detector(run_config(trained_run), path)[0].state_dict()) == set(trained())
    trainer = Trainer(run_config(trained_run, "OUTPUT_DIR", str(tmp_path), "SOLVER.MAX_ITER", "5"))
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 4


@pytest.mark.parametrize("change", ["options", "classes"])
def test_a_resume_with_other_options_or_classes(trained_run, shapes, tmp_path, change):
    overrides = ["OUTPUT_DIR", str(tmp_path)]
    if change == "options":
        shutil.copy(trained_run / "model_final.pth", tmp_path)
        overrides += [f"{OPTION}ATTENTION_MODE", "cyclic"]
    else:
        with_metadata(trained_run, tmp_path, "model_final.pth", classes=["circle", "triangle", "square"])
    trainer = Trainer(run_config(trained_run, *overrides))
    with pytest.raises(ConfigError, match="ATTENTION_MODE" if change == "options" else "triangle"):
        trainer.resume_or_load(resume=True)


def test_a_finished_run_as_a_new_start(trained_run, shapes, tmp_path):
    overrides = [*SMALL["retinanet"], "OUTPUT_DIR", str(tmp_path)]
    trainer = Trainer(run_config(trained_run, *overrides, "MODEL.WEIGHTS", str(trained_run / "model_final.pth")))
    trainer.resume_or_load(resume=False)
    state = torch.load(trained_run / "model_final.pth", weights_only=True)["model"]
    assert trainer.start_iter == 0 and equal(state, trainer.model.state_dict()) == set(state)
