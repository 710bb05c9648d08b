"""Models are timed as they are trained and run; memory and growth are what they are said to be."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from backbones import InputError
from backbones.attention.sliding_chunk import BACKENDS, SlidingChunkAttention
from projects_vil.analysis import (
    Case,
    as_json_of,
    draw_measurements,
    find_limits,
    format_limits,
    format_measurements,
    measure,
    measure_rates,
)
from projects_vil.analysis.benchmark import limits, measuring
from projects_vil.analysis.benchmark.baselines import build_baseline
from projects_vil.analysis.benchmark.limits import KINDS, Rates
from projects_vil.analysis.benchmark.measuring import Measurement
from projects_vil.analysis.benchmark.showing import growth
from tests.projects_vil.helpers import ROOT
from tests.selection import slow_except

SMALL = "vil_tiny_1_1_3_1_rpb"


def case(name: str, what: str = "backbone", *, is_baseline: bool = False, **options) -> Case:
    base = {"base": ROOT / "configs/base", "detector": "retinanet", "size": (64, 96)}
    return Case(name, is_baseline, what, **base | options)


def mistake(*args, **options) -> str:
    with pytest.raises(InputError) as caught:
        case(*args, **options).build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


_NO_TRITON = (
    "MODEL.TRANSFORMER.ATTENTION_BACKEND is triton, which needs a CUDA device, not 'cpu' (MODEL.DEVICE): take auto"
)


class Calls:
    """What modules of a kind were called with, while a step ran."""

    def __init__(self, kind: type) -> None:
        self.kind, self.inputs, self.training, self.shifts = kind, [], [], []

    def __enter__(self):
        self.handle = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_):
        self.handle.remove()

    def _note(self, module, inputs) -> None:
        if isinstance(module, self.kind):
            self.inputs.append([tuple(x.shape) for x in inputs if x is not None])
            self.training.append(module.training)
            self.shifts.append(getattr(module, "shift", None))


def test_a_backbone_gets_images_of_whole_strides():
    with Calls(SlidingChunkAttention) as calls:
        case(SMALL, size=(60, 90), batch_size=2).build()()
    # 64 x 96 pixels at strides 4, 8, 16 and 32
    assert [shapes[0][:3] for shapes in calls.inputs] == [(2, 16, 24), (2, 8, 12), *[(2, 4, 6)] * 3, (2, 2, 3)]
    assert not any(calls.training)


def test_attention_is_that_of_the_first_stage():
    with Calls(SlidingChunkAttention) as calls:
        case(SMALL, "attention").build()()
    assert calls.inputs == [[(1, 16, 24, 48), (1, 1, 48)]]
    assert "leave out --against r50" in mistake("r50", "attention", is_baseline=True)


@pytest.mark.parametrize("name, expected", [(SMALL, {None}), (f"{SMALL}+shift", set())])
def test_shifts_are_drawn_for_each_step(name, expected):
    step = case(name, backward=True).build()
    with Calls(SlidingChunkAttention) as calls:
        step()
        step()
    assert all(calls.training) and len(calls.shifts) == 12
    if expected:
        assert set(calls.shifts) == expected
    else:
        assert None not in calls.shifts and calls.shifts[:6] != calls.shifts[6:]
    assert "shifts are of training alone" in mistake(f"{SMALL}+shift")
    assert "lit_ti has no sliding chunks" in mistake("lit_ti+shift", backward=True)


def test_backends_are_those_that_are_named(monkeypatch):
    asked = []
    for name, kernel in BACKENDS.items():
        monkeypatch.setitem(
            BACKENDS, name, lambda *args, _n=name, _k=kernel, **options: asked.append(_n) or _k(*args, **options)
        )
    for name in (SMALL, f"{SMALL}+sdpa"):
        case(name).build()()
    assert asked == ["auto"] * 6 + ["sdpa"] * 6


def test_checkpointing_computes_twice():
    for name, times in ((SMALL, 1), (f"{SMALL}+checkpointing", 2)):
        with Calls(SlidingChunkAttention) as calls:
            case(name, backward=True).build()()
        assert len(calls.inputs) == 6 * times


@pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn"], {"retinanet"}))
@pytest.mark.parametrize("name, is_baseline", [(SMALL, False), ("r50", True)])
def test_a_training_step_moves_the_weights(detector, name, is_baseline):
    """And a detector at work does not."""
    seen = {}

    def note(module, inputs):
        if type(module).__name__ in ("RetinaNet", "GeneralizedRCNN"):
            seen["model"] = module

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        step = case(name, "train-step", is_baseline=is_baseline, detector=detector).build()
        step()
        before = {key: x.detach().clone() for key, x in seen["model"].named_parameters()}
        step()
        moved = [key for key, x in seen["model"].named_parameters() if not torch.equal(x, before[key])]
        assert any(key.startswith("backbone.bottom_up") for key in moved) and seen["model"].training
        case(name, "detector", is_baseline=is_baseline, detector=detector).build()()
        assert not seen["model"].training
    finally:
        handle.remove()


def test_autocast():
    found = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        case(SMALL, dtype="bfloat16").build()()
    finally:
        handle.remove()
    assert any(torch.is_tensor(x) and x.dtype == torch.bfloat16 for x in found)


def test_a_cvt_has_three_stages_in_a_detector():
    case("cvt_ls_13", "detector").build()


@pytest.mark.parametrize("name", ["r50", "swin_t", "pvt_v2_b0"])
def test_baselines_have_maps_of_four_strides(name):
    backbone = build_baseline(name).eval()
    with torch.no_grad():
        maps = backbone(torch.zeros(1, 3, 64, 96))
    shapes = backbone.output_shape()
    assert list(maps) == list(shapes) and [shape.stride for shape in shapes.values()] == [4, 8, 16, 32]
    for name, shape in shapes.items():
        assert maps[name].shape == (1, shape.channels, 64 // shape.stride, 96 // shape.stride)


@pytest.mark.parametrize(
    "name, is_baseline, message",
    [
        ("vil_tinny", False, "unknown variant 'vil_tinny'; did you mean 'vil_tiny'?"),
        (
            "vil_tiny+fast",
            False,
            "unknown modifier of vil_tiny 'fast': it is one of checkpointing, sdpa, triton, shift",
        ),
        ("vil_tiny_rpb+triton", False, _NO_TRITON),
        ("vil_tiny_rpb+triton+sdpa", False, "vil_tiny_rpb+triton+sdpa has two attention backends: name one"),
        ("absent.yaml", False, "there is no config file absent.yaml"),
        ("swin", True, "--against swin: it is r50, swin_t or a model of timm; did you mean 'swin_t'?"),
        ("vit_tiny_patch16_224", True, "--against vit_tiny_patch16_224: its maps are not of strides 4, 8, 16 and 32"),
    ],
)
def test_names_that_are_none(name, is_baseline, message):
    assert mistake(name, is_baseline=is_baseline) == message


# -- limits ----------------------------------------------------------------------------------------


A, B = torch.rand(8, 4), torch.rand(4, 6)
TARGET = torch.rand(8, 4)
# An index of 8 bytes is as much as two numbers.
ROW = torch.tensor([1])


@pytest.mark.parametrize(
    "step, flops, numbers",
    [
        (lambda: A @ B, 2 * 8 * 4 * 6, 8 * 4 + 4 * 6 + 8 * 6),
        (lambda: A.t() @ A, 2 * 4 * 8 * 4, 2 * 8 * 4 + 4 * 4),
        (lambda: torch.zeros(2, 8, 6).baddbmm_(A.expand(2, -1, -1), B.expand(2, -1, -1)), 2 * 2 * 8 * 4 * 6, None),
        (lambda: A + 1, 0, 2 * 8 * 4),
        (lambda: A.add_(0), 0, 2 * 8 * 4),
        (lambda: A[:, :1].expand(-1, 4) + 1, 0, 8 + 8 * 4),
        (lambda: A.view(4, 8).transpose(0, 1).detach(), 0, 0),
        (lambda: torch.empty(9), 0, 0),
        (lambda: TARGET.copy_(A), 0, 2 * 8 * 4),
        (lambda: TARGET.zero_(), 0, 8 * 4),
        (lambda: TARGET.fill_(2), 0, 8 * 4),
        (lambda: torch.zeros_like(A), 0, 8 * 4),
        (lambda: A.new_zeros(3), 0, 3),
        (lambda: A[ROW], 0, 4 + 2 + 4),
        (lambda: A.index_select(0, ROW), 0, 4 + 2 + 4),
        (lambda: A.gather(0, ROW[:, None]), 0, 1 + 2 + 1),
        (lambda: TARGET.index_put_((ROW,), A[:1]), 0, 4 + 2 + 4),
        (lambda: TARGET.index_put_((ROW,), A[:1], accumulate=True), 0, 4 + 2 + 2 * 4),
        (lambda: A.view(-1).unfold(0, 4, 1) + 1, 0, 8 * 4 + 29 * 4),
    ],
    ids=["product", "of itself", "product in place", "sum", "sum in place", "expanded", "views", "room"]
    + ["copy", "zeros", "fill", "zeros like", "new", "index", "select", "gather", "put", "put and add", "overlapping"],
)
def test_work_of_an_operator(step, flops, numbers):
    """Floating-point operations at one a second, or bytes at one a second, counted by hand."""
    for rates, bound, expected in (
        (Rates(flops=1.0, bytes=1e30, call=0.0), "arithmetic", flops),
        (Rates(flops=1e30, bytes=1.0, call=0.0), "memory", None if numbers is None else 4 * numbers),
    ):
        with limits.Work("cpu", rates) as work:
            step()
        if expected is not None:
            assert work.shortest[bound] == pytest.approx(expected)
    assert work.operators == (2 if numbers is None else bool(numbers))


def test_small_operators_are_held_up_by_their_call():
    with limits.Work("cpu", Rates(flops=1e30, bytes=1e30, call=0.5)) as work:
        (A + 1).mul_(2)
    assert work.shortest == {"arithmetic": 0, "memory": 0, "overhead": 1.0} and work.operators == 2


@pytest.mark.parametrize(
    "kind, names",
    [
        ("attention", ["_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_backward"]),
        ("products", ["mm", "addmm", "bmm", "baddbmm_"]),
        ("convolutions", ["convolution", "convolution_backward", "deform_conv2d"]),
        ("norms", ["native_layer_norm", "native_layer_norm_backward", "native_batch_norm"]),
        ("copies", ["copy_", "cat", "clone", "constant_pad_nd"]),
        ("other", ["gelu", "add", "_softmax"]),
    ],
)
def test_kinds_of_operators(kind, names):
    assert {limits.kind_of(name) for name in names} == {kind}


def test_backward_passes_calculate_twice_as_much():
    """And again what attention keeps no scores of."""
    flops = [
        find_limits(case(SMALL, backward=backward), Rates(flops=1.0, bytes=1e30, call=0.0)).limit
        for backward in (False, True)
    ]
    assert 2.9 < flops[1] / flops[0] < 4


def test_limits_of_a_model():
    rates = measure_rates("cpu", "float32")
    assert rates.flops > 1e9 and rates.bytes > 1e8 and 1e-8 < rates.call < 1e-3
    forward, both = (find_limits(case(SMALL, backward=backward), rates) for backward in (False, True))
    assert both.operators > forward.operators > 100 and forward.limit == sum(forward.shortest.values())
    assert all(forward.seconds[kind] > 0 for kind in KINDS)
    (measured,) = measure([forward.case], runs=1, memory=False)
    table = format_limits([forward], [measured], rates).splitlines()
    assert len(table) == 6 and {line.count("|") for line in table[3:]} == {6 + 3 + len(KINDS) + 1}
    said = as_json_of([measured], [forward], rates)
    assert said["rates"] == {"flops": rates.flops, "bytes": rates.bytes, "call": rates.call}
    row = said["measurements"][0]
    assert row["limit"] == forward.shortest and row["seconds_by_kind"] == forward.seconds


# -- figures ---------------------------------------------------------------------------------------


def test_medians_quartiles_and_ratios(monkeypatch):
    """By turns: two models, three runs; the second call of the clock is the end of a run."""
    seconds = iter([1.0, 2.0, 3.0, 3.0, 2.0, 8.0])
    monkeypatch.setattr(measuring, "seconds_of", lambda step, device: next(seconds))
    monkeypatch.setattr(Case, "build", lambda self: lambda: None)
    first, second = measure([case("a"), case("b", batch_size=4)], reference=0, runs=3, memory=False)
    assert (first.seconds, second.seconds) == (2.0, 3.0)
    assert (first.ratio, second.ratio, second.images_per_second) == (1.0, 2.0, 4 / 3)
    assert first.low < first.seconds < first.high and first.memory is None


@pytest.mark.slow
def test_memory_is_that_of_the_call_alone():
    """Of images four times as large about four times as much, in a process of its own."""
    sizes = (320, 384), (640, 768)
    small, large = (measure([case(SMALL, size=size, backward=True)], runs=1)[0].memory for size in sizes)
    # Of small images what a first call brings along, whatever their size, would count as well.
    assert 50e6 < small < 500e6
    assert 2 < large / small < 4.5


def test_growth_and_what_is_shown(tmp_path):
    found = [
        Measurement(case(name, size=size), factor * pixels**power, 0.5, 2.0, 1.0, 1.0, 1.0, int(1e3 * pixels))
        for name, factor, power in (("linear", 1e-6, 1.0), ("quadratic", 1e-12, 2.0))
        for size in ((100, 200), (200, 400), (400, 800))
        for pixels in (size[0] * size[1],)
    ]
    for name, exponent in (("linear", 1.0), ("quadratic", 2.0)):
        assert growth(found)[name] == pytest.approx({"time": exponent, "memory": 1.0}, abs=1e-6)
    table = format_measurements(found, reference="linear")
    assert "| linear | 400 x 800 | 0.320 (0.500 to 2.000) | 3.12 | 1.00 (1.00 to 1.00) | 0.32 | 1.00 |" in table
    assert "quadratic: time grows as pixels to the 2.00, memory grows as pixels to the 1.00" in table
    content = json.loads(json.dumps(as_json_of(found)))
    assert content["measurements"][0]["size"] == [100, 200] and set(content["growth"]) == {"linear", "quadratic"}
    for several in (found, [dataclasses.replace(found[0], memory=None)]):
        draw_measurements(several, tmp_path / "growth.png")
        assert (tmp_path / "growth.png").stat().st_size > 5000
