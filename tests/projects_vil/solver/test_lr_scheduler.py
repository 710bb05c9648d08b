"""When parameters learn at which rate."""

import pytest
import torch
from torch import nn

from backbones import InputError
from projects_vil.solver import build_lr_scheduler, build_optimizer, shown_group
from tests.projects_vil.helpers import small_config


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def rates(*overrides: str, multipliers: str = "[]") -> list[list[float]]:
    """Learning rates of all groups before iterations 0 to 9 of 10, and after the last, from a base of 0.5."""
    base = ["SOLVER.BASE_LR", "0.5", "SOLVER.MAX_ITER", "10", "SOLVER.WARMUP_ITERS", "0"]
    cfg = small_config("semantic_fpn", *base, "SOLVER.LR_MULTIPLIERS", multipliers, *overrides)
    optimizer = build_optimizer(cfg, two_layers())
    scheduler = build_lr_scheduler(cfg, optimizer)
    values = [scheduler.get_last_lr()]
    for _ in range(10):
        optimizer.step()
        scheduler.step()
        values.append(scheduler.get_last_lr())
    return values


@pytest.mark.parametrize("power", [0.9, 1.0, 2.5])
def test_polynomial_decay(power):
    values = rates("SOLVER.POLY_LR_POWER", str(power))
    for iteration, value in enumerate(values):
        assert value == pytest.approx([0.5 * (1 - iteration / 10) ** power] * 2), iteration


def test_polynomial_decay_to_a_last_rate():
    values = rates("SOLVER.BASE_LR_END", "0.1")
    assert [value[0] for value in values] == pytest.approx([0.1 + 0.4 * (1 - i / 10) ** 0.9 for i in range(11)])


def test_warm_up_meets_the_polynomial():
    values = [value[0] for value in rates("SOLVER.WARMUP_ITERS", "4", "SOLVER.WARMUP_FACTOR", "0.01")]
    decayed = [0.5 * (1 - i / 10) ** 0.9 for i in range(11)]
    assert values[4:] == pytest.approx(decayed[4:])
    assert values[:4] == pytest.approx([0.005 + (decayed[4] - 0.005) * i / 4 for i in range(4)])


def test_multiplied_rates_decay_alike():
    values = rates(multipliers="[['0.*', 0.01]]")
    assert all(min(value) == pytest.approx(0.01 * max(value)) for value in values)


@pytest.mark.parametrize("name", ["WarmupMultiStepLR", "WarmupCosineLR"])
def test_schedules_of_detectron2(name):
    values = [value[0] for value in rates("SOLVER.LR_SCHEDULER_NAME", name, "SOLVER.STEPS", "(5,)")]
    assert values[0] == pytest.approx(0.5)
    assert values[5] == pytest.approx(0.05 if name == "WarmupMultiStepLR" else 0.25)


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("LR_SCHEDULER_NAME", "WarmupPolyLr", "unknown SOLVER.LR_SCHEDULER_NAME 'WarmupPolyLr'.*mean 'WarmupPolyLR'"),
        ("POLY_LR_POWER", "0.0", "SOLVER.POLY_LR_POWER is 0.0: it is above 0"),
        ("BASE_LR_END", "0.6", "SOLVER.BASE_LR_END is 0.6: it is 0 to SOLVER.BASE_LR, 0.5"),
        ("BASE_LR_END", "-0.1", "SOLVER.BASE_LR_END is -0.1"),
    ],
)
def test_schedules_that_are_none(key, value, expected):
    with pytest.raises(InputError, match=expected):
        rates(f"SOLVER.{key}", value)


def test_the_rate_that_is_said_is_no_share():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(9)]
    groups = [(parameters[:5], 0.04), (parameters[5:6], 0.1), (parameters[6:8], 0.1), (parameters[8:], 0.2)]
    optimizer = torch.optim.SGD([{"params": some, "lr": rate} for some, rate in groups], lr=0.1)
    assert shown_group(optimizer) == 2
    # A schedule has moved them.
    for group in optimizer.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], group["lr"] / 4
    assert shown_group(optimizer) == 2
    optimizer = torch.optim.SGD([{"params": some, "lr": rate} for some, rate in groups], lr=0.3)
    assert shown_group(optimizer) == 0
