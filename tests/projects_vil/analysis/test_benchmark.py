"""The benchmark runs models as training and inference do."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.analysis import BenchmarkCase, benchmark, measure, tune_attention
from projects_vil.analysis.benchmark import build_baseline
from tests.projects_vil.helpers import ROOT, message
from tests.selection import slow_except

SMALL = "vil_tiny_1_1_3_1_rpb"


def case(name: str, part: str = "backbone", *, is_baseline: bool = False, detector: str = "retinanet", **options):
    base = {"base": ROOT / f"configs/base/{detector}.yaml", "size": (64, 96)}
    return BenchmarkCase(name, is_baseline, part, **base | options)


@pytest.fixture
def calls():
    """Collect (module, input sizes, shift, output) of each call of a sliding-chunk module or a detector."""
    found = []

    def note(module, inputs, output):
        if isinstance(module, SlidingChunkAttention) or type(module).__name__ in ("RetinaNet", "GeneralizedRCNN"):
            shape = inputs[1:] and (*inputs[0].shape, *inputs[1])
            found.append((module, shape, getattr(module, "shift", None), output))

    handle = nn.modules.module.register_module_forward_hook(note)
    yield found
    handle.remove()


def test_inputs_of_backbones_and_attention(calls):
    case(SMALL, size=(60, 90), batch_size=2, dtype="bfloat16").build()()
    # 64 x 96 pixels at strides 4, 8, 16 and 32
    assert [shape[3:] for _, shape, *_ in calls] == [(16, 24), (8, 12), *[(4, 6)] * 3, (2, 3)]
    assert not any(module.training for module, *_ in calls) and calls[0][3][0].dtype == torch.bfloat16
    calls.clear()
    case(SMALL, "attention").build()()
    assert [shape for _, shape, *_ in calls] == [(1, 1 + 16 * 24, 48, 16, 24)]


def test_suffixes(calls):
    """Each step samples new shifts, activation checkpointing runs blocks twice, and backends are selected."""
    shifts = []
    assert "CHUNK_SIZE" in message(case(f"{SMALL}+CHUNK_SIZ=4").build)
    for suffix in ("", "+shift", "+ACTIVATION_CHECKPOINTING=True", "+ATTENTION_BACKEND=reference"):
        step = case(SMALL + suffix, backward=True).build()
        calls.clear()
        step()
        step()
        shifts.append([shift for _, _, shift, _ in calls])
        assert all(module.training for module, *_ in calls)
        assert {module.backend for module, *_ in calls} == {suffix.partition("BACKEND=")[2] or "auto"}
    assert shifts[0] == shifts[3] == [None] * 12 and shifts[2] == [None] * 24
    assert None not in shifts[1] and shifts[1][:6] != shifts[1][6:]


@pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn"], {"retinanet"}))
@pytest.mark.parametrize("name", slow_except([SMALL, "r50", "timm:pvt_v2_b0+ACTIVATION_CHECKPOINTING=True"], [SMALL]))
def test_a_training_step_changes_the_weights(calls, detector, name):
    options = {"is_baseline": name == "r50", "detector": detector}
    step = case(name, "train-step", **options).build()
    step()
    model = calls[-1][0]
    before = {key: x.detach().clone() for key, x in model.named_parameters()}
    optimized = []
    model.register_forward_hook(lambda *_: optimized.append(torch._C._get_graph_executor_optimize()))
    step()
    # TorchScript runs as in training.
    assert optimized == [False]
    changed = [key for key, x in model.named_parameters() if not torch.equal(x, before[key])]
    assert any(key.startswith("backbone.bottom_up") for key in changed) and model.training
    case(name, "detector", **options).build()()
    assert not calls[-1][0].training


@pytest.mark.parametrize("name", slow_except(["r50", "swin_t", "pvt_v2_b0"], ["pvt_v2_b0"]))
def test_baselines_have_feature_maps_of_four_strides(name):
    backbone = build_baseline(name).eval()
    with torch.no_grad():
        features = backbone(torch.zeros(1, 3, 64, 96))
    shapes = backbone.output_shape()
    assert list(features) == list(shapes) and [shape.stride for shape in shapes.values()] == [4, 8, 16, 32]
    for name, shape in shapes.items():
        assert features[name].shape == (1, shape.channels, 64 // shape.stride, 96 // shape.stride)


@pytest.mark.slow
def test_models_that_cannot_be_measured():
    parts = {f"{SMALL}+shift": {}, "timm:pvt_v2_b0": {"part": "attention"}, "swin": {"is_baseline": True}}
    for name, options in parts.items():
        assert name in message(case(name, **options).build)


@pytest.mark.parametrize("times, chosen", [([2.0, 2.0, 1.0, 1.0], "triton"), ([1.0, 1.0, 0.5, 1.45], "sdpa")])
def test_choice_of_the_attention_backend(monkeypatch, tmp_path, times, chosen):
    """The faster backend for all models and sizes is stored for the GPU and dtype. Other choices in the file stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    steps = []

    def measured(own_steps, *, runs, memory):
        steps.extend((step.name, step.size, step.backward) for step in own_steps)
        return np.array([[9.0, seconds, seconds] for seconds in times]), []

    for dtype in ("float32", "bfloat16"):
        cases = [case(SMALL, "attention", size=size, dtype=dtype, device="cuda") for size in ((64, 96), (40, 130))]
        lines = tune_attention(cases, runs=3, measure=measured)
    choices = json.loads((tmp_path / "vil-detectron2/attention.json").read_text())
    assert list(choices.values()) == [chosen] * 2 and all(key.startswith("capability 8.9, ") for key in choices)
    assert f"sdpa {1e3 * sum(times[:2]):.1f} ms" in lines[0] and f"is now {chosen}" in lines[1]
    names = [f"{SMALL}+ATTENTION_BACKEND={backend}" for backend in ("sdpa", "sdpa", "triton", "triton")]
    assert steps == [(name, size, True) for name, size in zip(names, [(64, 96), (40, 130)] * 2, strict=True)] * 2


def test_there_is_no_choice_without_a_gpu():
    assert "--tune needs a GPU" in message(tune_attention, [case(SMALL)])


# -- measurements ----------------------------------------------------------------------------------


def test_medians_and_ratios(monkeypatch):
    """Two models run alternately, three times each."""
    seconds = itertools.chain([1.0, 2.0, 3.0, 3.0, 2.0, 8.0])
    monkeypatch.setattr(benchmark, "seconds_of", lambda step: next(seconds))
    monkeypatch.setattr(BenchmarkCase, "build", lambda self: lambda: None)
    first, second = measure([case("a"), case("b", batch_size=4)], reference=0, runs=3, memory=False)
    assert (first["seconds"], second["seconds"], second["images_per_second"]) == (2.0, 3.0, 4 / 3)
    assert (second["ratio"], second["ratio_quartiles"]) == (2.0, [1.5, 3.0]) and first["memory"] is None
