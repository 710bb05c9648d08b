"""A classifier of this project, trained by timm's scripts or otherwise, becomes the start of a detector."""

import argparse
import functools

import numpy as np
import pytest
import torch

from backbones import InputError, create_backbone, create_classifier
from projects_vil.checkpoint import Checkpointer, check_weights
from tests.backbones.helpers import randomise
from tests.projects_vil.checkpoint.origins.test_official_weights import BOTTOM_UP, LOG, interpolated
from tests.projects_vil.checkpoint.test_detection_checkpoint import detector, log_of, save
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except

# Absolute, relative, long-short, LIT's two kinds, random features, CvT
NAMES = ["vil_tiny_1_1_3_1", "vil_tiny_1_1_3_1_rpb", "ls_tiny", "lit_ti", "lit_s", "performer_tiny"]


@functools.cache
def classifier(name: str, **options) -> torch.nn.Module:
    """Made once: the tests read its weights."""
    return randomise(create_classifier(name, num_classes=10, **options)).eval()


def load(path: str, name: str, *overrides: str) -> torch.nn.Module:
    overrides = ["MODEL.TRANSFORMER.NAME", name, *overrides]
    cfg = small_config("retinanet", *overrides)
    check_weights(cfg, path)
    model = detector("retinanet", *overrides).eval()
    Checkpointer(model, cfg=cfg).load(path)
    return model


@pytest.mark.parametrize("name", slow_except(NAMES, NAMES[:2]))
@pytest.mark.parametrize("wrapped", [False, True])
def test_each_tensor_goes_to_its_place(tmp_path, name, wrapped):
    state = classifier(name).state_dict()
    contents = {f"module.{key}": tensor for key, tensor in state.items()} if wrapped else {"state_dict": state}
    loaded = load(save(tmp_path, contents), name).state_dict()
    same = 0
    for key, tensor in state.items():
        place = f"{BOTTOM_UP}{key.removeprefix('backbone.')}"
        if place in loaded and loaded[place].shape == tensor.shape:
            assert torch.equal(loaded[place], tensor), key
            same += 1
    assert same > len(state) / 2
    norms = [key for key in loaded if "output_norms" in key]
    assert len(norms) == (6 if name == "lit_s" else 0)
    assert all((loaded[key] == float(key.endswith("weight"))).all() for key in norms)


@pytest.mark.parametrize("name", slow_except(["vil_tiny_1_1_3_1_rpb", "ls_tiny", "lit_ti"], ["vil_tiny_1_1_3_1_rpb"]))
def test_the_maps_are_those_of_the_classifiers_backbone(tmp_path, name):
    """Where no table is made for the size of the image."""
    model = classifier(name)
    bottom_up = load(save(tmp_path, {"state_dict": model.state_dict()}), name).backbone.bottom_up
    images = torch.rand(1, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    reference = create_backbone(name, out_features=("stage2", "stage3")).eval()
    reference.load_state_dict(
        {
            key.removeprefix("backbone."): tensor
            for key, tensor in model.state_dict().items()
            if key.removeprefix("backbone.") in reference.state_dict()
        }
    )
    with torch.inference_mode():
        maps, expected = bottom_up(images), reference(images)
    for stage, output in expected.items():
        torch.testing.assert_close(maps[stage], output)


def test_positions_are_resized(tmp_path):
    state = classifier("vil_tiny_1_1_3_1").state_dict()
    with log_of(LOG) as log:
        loaded = load(save(tmp_path, {"state_dict": state}), "vil_tiny_1_1_3_1").state_dict()
    for stage, length in enumerate((336, 168, 84, 42)):
        table = state[f"backbone.stages.{stage}.positions.rows"].double().numpy()
        expected = torch.from_numpy(interpolated(table, length))
        actual = loaded[f"{BOTTOM_UP}stages.{stage}.positions.rows"].double()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert any("resized: stages.0.positions.rows (56, 24) to (336, 24)" in text for text in log)
    assert any("dropped: norm.weight, norm.bias, head.weight, head.bias" in text for text in log)


@pytest.mark.slow
def test_lits_bias_is_resized_by_cubics(tmp_path):
    state = classifier("lit_s").state_dict()
    loaded = load(save(tmp_path, {"state_dict": state}), "lit_s").state_dict()
    key = "stages.3.blocks.1.attention.relative_bias.table"
    table = state[f"backbone.{key}"].T.reshape(1, 24, 13, 13)
    expected = torch.nn.functional.interpolate(table, size=(49, 49), mode="bicubic").flatten(2)[0].T
    torch.testing.assert_close(loaded[f"{BOTTOM_UP}{key}"], expected)
    assert np.prod(expected.shape) == loaded[f"{BOTTOM_UP}{key}"].numel()


@pytest.mark.slow
def test_a_segmentors_backbone_starts_from_the_classifier_of_its_size(tmp_path):
    contents = {"state_dict": classifier("lit_s").state_dict(), "args": argparse.Namespace(model="lit_s")}
    loaded = load(save(tmp_path, contents), "lit_s_seg").state_dict()
    key = "stages.2.blocks.5.mlp.expand.weight"
    assert torch.equal(loaded[f"{BOTTOM_UP}{key}"], contents["state_dict"][f"backbone.{key}"])
    norms = [key for key in loaded if "output_norms" in key]
    assert len(norms) == 6 and all((loaded[key] == float(key.endswith("weight"))).all() for key in norms)
    assert "is of lit_s, and the model is lit_m_seg" in message(save(tmp_path, contents), "lit_m_seg")


def message(path: str, name: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(path, name, *overrides)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit(tmp_path):
    name = "vil_tiny_1_1_3_1_rpb"
    state = classifier(name).state_dict()
    arguments = argparse.Namespace(model="vil_tiny_rpb")
    path = save(tmp_path, {"state_dict": state, "args": arguments})
    assert "is of vil_tiny_rpb, and the model is vil_tiny_1_1_3_1_rpb" in message(path, name)
    path = save(tmp_path, {"state_dict": state})
    text = message(path, "vil_small_rpb")
    assert "the model is vil_small_rpb" in text and "there and" in text
    assert "no rule explains" in message(path, "vil_tiny_1_1_3_1")
    extra = state | {"backbone.stages.0.extra": torch.ones(1)}
    assert "no rule explains backbone.stages.0.extra" in message(save(tmp_path, extra), name)
    half = dict(list(state.items())[: len(state) // 2])
    assert "nothing fills" in message(save(tmp_path, half), name)
    wider = classifier(name, window_size=9).state_dict()
    assert load(save(tmp_path, wider), name)  # resized


@pytest.mark.parametrize("name", ["vil_tiny_1_1_3_1", "vil_tiny_1_1_3_1_rpb"])
@pytest.mark.parametrize("ours", ["[0, 0, 0, 0]", "[2, 1, 1, 0]"])
def test_other_global_tokens_are_refused_and_the_key_named(tmp_path, name, ours):
    path = save(tmp_path, {"state_dict": classifier(name).state_dict()})
    text = message(path, name, "MODEL.TRANSFORMER.GLOBAL_TOKENS", ours)
    assert "stages.0.global_tokens" in text
    assert text.endswith("it has the global tokens of MODEL.TRANSFORMER.GLOBAL_TOKENS '[1, 1, 1, 0]'")


def test_the_key_that_is_named_is_the_one_that_helps(tmp_path):
    name = "vil_tiny_1_1_3_1"
    path = save(tmp_path, {"state_dict": classifier(name, global_tokens=(1, 2, 1, 1)).state_dict()})
    assert message(path, name).endswith("MODEL.TRANSFORMER.GLOBAL_TOKENS '[1, 2, 1, 1]'")
    assert load(path, name, "MODEL.TRANSFORMER.GLOBAL_TOKENS", "[1, 2, 1, 1]")


@pytest.mark.parametrize(
    "name, key",
    [
        ("vil_tiny_1_1_3_1_rpb", "norm.running_mean"),
        ("vil_tiny_1_1_3_1_rpb", "head.fc.weight"),
        ("vil_tiny_1_1_3_1_rpb", "backbone.head.weight"),
        ("vil_tiny_1_1_3_1_rpb", "backbone.stages.3.global_tokens"),
        ("lit_ti", "backbone.stages.2.global_tokens"),
    ],
)
def test_only_what_a_classifier_alone_has_is_dropped(tmp_path, name, key):
    state = classifier(name).state_dict() | {key: torch.ones(1, 1, 4)}
    assert f"no rule explains {key}" in message(save(tmp_path, state), name)


@pytest.mark.slow
def test_what_lit_ti_drops(tmp_path):
    with log_of(LOG) as log:
        load(save(tmp_path, classifier("lit_ti").state_dict()), "lit_ti")
    dropped = [text for text in log if text.startswith("dropped: ")]
    assert len(dropped) == 1 and all(
        key in dropped[0]
        for key in ("stages.3.global_tokens", "stages.3.positions.global_tokens", "norm.bias", "head.weight")
    )


def test_a_classifier_is_no_detector(tmp_path):
    path = save(tmp_path, {"state_dict": classifier("vil_tiny_1_1_3_1_rpb").state_dict()})
    with pytest.raises(InputError, match="parameters of the model are not in it"):
        check_weights(small_config(), path, complete=True)
