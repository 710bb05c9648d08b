"""Models are measured as they are trained and run; the work of operators equals hand counts."""

import json
import math

import pytest
import torch
from torch import nn

from backbones import ConfigError
from backbones.attention.sliding_chunk import BACKENDS, SlidingChunkAttention
from projects_vil.analysis import (
    BenchmarkCase,
    benchmark,
    find_limits,
    format_limits,
    format_measurements,
    growth,
    measure,
    measure_rates,
    measurements_as_dicts,
    plot_measurements,
)
from projects_vil.analysis.benchmark import Measurement, build_baseline
from projects_vil.analysis.counting import operator_type
from projects_vil.analysis.limits import OPERATOR_TYPES, DeviceRates
from tests.projects_vil.helpers import ROOT
from tests.selection import slow_except

SMALL = "vil_tiny_1_1_3_1_rpb"


def case(name: str, part: str = "backbone", *, is_baseline: bool = False, **options) -> BenchmarkCase:
    base = {"base": ROOT / "configs/base", "detector": "retinanet", "size": (64, 96)}
    return BenchmarkCase(name, is_baseline, part, **base | options)


class Calls:
    """Collect the calls of modules of a type while a step runs."""

    def __init__(self, module_type: type) -> None:
        self.module_type, self.inputs, self.training, self.shifts = module_type, [], [], []

    def __enter__(self):
        self.handle = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_):
        self.handle.remove()

    def _note(self, module, inputs) -> None:
        if isinstance(module, self.module_type):
            self.inputs.append([tuple(x.shape) for x in inputs if x is not None])
            self.training.append(module.training)
            self.shifts.append(getattr(module, "shift", None))


def test_a_backbone_gets_padded_images_and_attention_those_of_the_first_stage():
    with Calls(SlidingChunkAttention) as calls:
        case(SMALL, size=(60, 90), batch_size=2).build()()
    # 64 x 96 pixels at strides 4, 8, 16 and 32
    assert [shapes[0][:3] for shapes in calls.inputs] == [(2, 16, 24), (2, 8, 12), *[(2, 4, 6)] * 3, (2, 2, 3)]
    assert not any(calls.training)
    with Calls(SlidingChunkAttention) as calls:
        case(SMALL, "attention").build()()
    assert calls.inputs == [[(1, 16, 24, 48), (1, 1, 48)]]


@pytest.mark.parametrize("shift", [False, True])
def test_shifts_are_sampled_for_each_step(shift):
    step = case(SMALL + "+shift" * shift, backward=True).build()
    with Calls(SlidingChunkAttention) as calls:
        step()
        step()
    assert all(calls.training) and len(calls.shifts) == 12
    if shift:
        assert None not in calls.shifts and calls.shifts[:6] != calls.shifts[6:]
    else:
        assert set(calls.shifts) == {None}


def test_backends_and_checkpointing(monkeypatch):
    called = []
    for name, kernel in BACKENDS.items():
        monkeypatch.setitem(
            BACKENDS, name, lambda *args, _n=name, _k=kernel, **options: called.append(_n) or _k(*args, **options)
        )
    for name in (SMALL, f"{SMALL}+sdpa"):
        case(name).build()()
    assert called == ["auto"] * 6 + ["sdpa"] * 6
    with Calls(SlidingChunkAttention) as calls:
        case(f"{SMALL}+checkpointing", backward=True).build()()
    assert len(calls.inputs) == 6 * 2


@pytest.mark.parametrize("detector", slow_except(["retinanet", "mask_rcnn"], {"retinanet"}))
@pytest.mark.parametrize("name, is_baseline", [(SMALL, False), ("r50", True)])
def test_a_training_step_changes_the_weights(detector, name, is_baseline):
    found = {}

    def note(module, inputs):
        if type(module).__name__ in ("RetinaNet", "GeneralizedRCNN"):
            found["model"] = module

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        step = case(name, "train-step", is_baseline=is_baseline, detector=detector).build()
        step()
        before = {key: x.detach().clone() for key, x in found["model"].named_parameters()}
        step()
        changed = [key for key, x in found["model"].named_parameters() if not torch.equal(x, before[key])]
        assert any(key.startswith("backbone.bottom_up") for key in changed) and found["model"].training
        case(name, "detector", is_baseline=is_baseline, detector=detector).build()()
        assert not found["model"].training
    finally:
        handle.remove()


def test_autocast_and_three_stages():
    found = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: found.append(output))
    try:
        case(SMALL, dtype="bfloat16").build()()
    finally:
        handle.remove()
    assert any(torch.is_tensor(x) and x.dtype == torch.bfloat16 for x in found)
    case("cvt_ls_13", "detector").build()


@pytest.mark.parametrize("name", ["r50", "swin_t", "pvt_v2_b0"])
def test_baselines_have_feature_maps_of_four_strides(name):
    backbone = build_baseline(name).eval()
    with torch.no_grad():
        features = backbone(torch.zeros(1, 3, 64, 96))
    shapes = backbone.output_shape()
    assert list(features) == list(shapes) and [shape.stride for shape in shapes.values()] == [4, 8, 16, 32]
    for name, shape in shapes.items():
        assert features[name].shape == (1, shape.channels, 64 // shape.stride, 96 // shape.stride)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("vil_tinny", {}, "'vil_tinny'"),
        ("vil_tiny+fast", {}, "'fast'"),
        ("vil_tiny_rpb+triton", {}, "MODEL.TRANSFORMER.ATTENTION_BACKEND"),
        ("vil_tiny_rpb+triton+sdpa", {}, "vil_tiny_rpb"),
        ("absent.yaml", {}, "absent.yaml"),
        (f"{SMALL}+shift", {}, r"\+shift"),
        ("lit_ti+shift", {"backward": True}, "lit_ti"),
        ("r50", {"is_baseline": True, "part": "attention"}, "r50"),
        ("swin", {"is_baseline": True}, "'swin_t'"),
        ("vit_tiny_patch16_224", {"is_baseline": True}, "vit_tiny_patch16_224"),
    ],
)
def test_models_that_cannot_be_measured(name, options, message):
    with pytest.raises(ConfigError, match=message):
        case(name, **options).build()


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
    ids=["product", "of itself", "in-place product", "sum", "in-place sum", "expanded", "views", "empty"]
    + ["copy", "zeros", "fill", "zeros like", "new", "index", "select", "gather", "put", "put and add", "overlapping"],
)
def test_work_of_an_operator(step, flops, numbers):
    """Floating-point operations at one a second, or bytes at one a second, counted by hand."""
    for rates, bound, expected in (
        (DeviceRates(flops=1.0, bytes=1e30, call=0.0), "arithmetic", flops),
        (DeviceRates(flops=1e30, bytes=1.0, call=0.0), "memory", None if numbers is None else 4 * numbers),
    ):
        work = find_limits(step, rates)
        if expected is not None:
            assert work.limits[bound] == pytest.approx(expected)
    assert work.operators == (2 if numbers is None else bool(numbers))


def test_small_operators_are_bound_by_their_calls():
    work = find_limits(lambda: (A + 1).mul_(2), DeviceRates(flops=1e30, bytes=1e30, call=0.5))
    assert work.limits == {"arithmetic": 0, "memory": 0, "overhead": 1.0} and work.operators == 2


@pytest.mark.parametrize(
    "label, names",
    [
        ("attention", ["_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_backward"]),
        ("matmul", ["mm", "addmm", "bmm", "baddbmm_"]),
        ("convolution", ["convolution", "convolution_backward", "deform_conv2d"]),
        ("norm", ["native_layer_norm", "native_layer_norm_backward", "native_batch_norm"]),
        ("copy", ["copy_", "cat", "clone", "constant_pad_nd"]),
        ("other", ["gelu", "add", "_softmax"]),
    ],
)
def test_types_of_operators(label, names):
    assert {operator_type(name) for name in names} == {label}


def test_a_backward_pass_has_twice_the_work_of_the_forward_pass():
    """Attention keeps no scores, so that its backward pass computes them a second time."""
    rates = DeviceRates(flops=1.0, bytes=1e30, call=0.0)
    forward, both = (find_limits(case(SMALL, backward=backward).build(), rates) for backward in (False, True))
    assert 2.9 < both.limit / forward.limit < 4 and both.operators > forward.operators > 100
    assert set(forward.seconds) == set(OPERATOR_TYPES) and all(forward.seconds.values())


def test_rates_and_the_table_of_limits():
    rates = measure_rates("cpu", "float32")
    assert min(rates.flops, rates.bytes, rates.call) > 0
    one = case(SMALL)
    (measured,) = measure([one], runs=1, memory=False)
    table = format_limits([find_limits(one.build(), rates)], [measured], rates).splitlines()[-3:]
    assert SMALL in table[2] and {line.count("|") for line in table} == {6 + 3 + len(OPERATOR_TYPES) + 1}


# -- measurements ----------------------------------------------------------------------------------


def test_medians_and_ratios(monkeypatch):
    """Two models run interleaved, three times each."""
    seconds = iter([1.0, 2.0, 3.0, 3.0, 2.0, 8.0])
    monkeypatch.setattr(benchmark, "seconds_of", lambda step: next(seconds))
    monkeypatch.setattr(BenchmarkCase, "build", lambda self: lambda: None)
    first, second = measure([case("a"), case("b", batch_size=4)], reference=0, runs=3, memory=False)
    assert (first.times, second.times, second.ratios) == ([1.0, 3.0, 2.0], [2.0, 3.0, 8.0], [2.0, 1.0, 4.0])
    assert (first.seconds, second.seconds, second.images_per_second) == (2.0, 3.0, 4 / 3)
    assert first.memory is None and measurements_as_dicts([second])[0]["ratio"] == 2.0


@pytest.mark.slow
def test_memory_is_measured_in_a_new_process():
    small, large = (measure([case(SMALL, size=size, backward=True)], runs=1)[0] for size in ((320, 384), (960, 1152)))
    if small.memory is not None:  # the system has /proc
        assert 0 < small.memory < large.memory


def test_growth_table_and_plot(tmp_path):
    sizes = (100, 200), (200, 400), (400, 800)
    measured = [
        Measurement(case(name, size=size), [factor * math.prod(size) ** power], [1.0], 1000 * math.prod(size))
        for name, factor, power in (("linear", 1e-6, 1.0), ("quadratic", 1e-12, 2.0))
        for size in sizes
    ]
    for name, exponent in (("linear", 1.0), ("quadratic", 2.0)):
        assert growth(measured)[name] == pytest.approx({"time": exponent, "memory": 1.0}, abs=1e-6)
    rows = [line.split("|") for line in format_measurements(measured, reference="linear").splitlines()]
    cells = next([cell.strip() for cell in row] for row in rows if "400 x 800" in "|".join(row))
    assert cells[1:4] == ["linear", "400 x 800", "0.320 (0.320 to 0.320)"]
    assert cells[4:8] == ["3.12", "1.00 (1.00 to 1.00)", "0.32", "1.00"]
    rows = json.loads(json.dumps(measurements_as_dicts(measured)))
    assert [row["size"] for row in rows[:3]] == [list(size) for size in sizes] and rows[0]["memory"] == 20_000_000
    plot_measurements(measured, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
