"""Every fault ends in its one line, as docs/faults.md has it, and nothing is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.document import PATH, row
from tests.faults.fault import Fault, happen
from tests.faults.matrix import FAULTS, MATRIX
from tests.faults.world import make_world
from tests.selection import slow_except

# What needs no trained run and ends before a first iteration takes a fifth of a second.
FAST = [
    fault.name for fault in FAULTS.values() if not (fault.parts or fault.meanwhile or fault.file_size or fault.begins)
]


@pytest.fixture(scope="module")
def world(made_once) -> Callable[[Fault], Path]:
    def of(fault: Fault) -> Path:
        if fault.parts:
            return made_once("world_of_faults", make_world)
        return made_once("small_world_of_faults", lambda folder: make_world(folder, with_run=False))

    return of


@pytest.mark.parametrize("name", slow_except(FAULTS, FAST))
def test_a_fault_ends_in_its_line(world, tmp_path, name):
    fault = FAULTS[name]
    if "GPU that is not here" in name and torch.cuda.is_available():
        pytest.skip("there is one")
    outcome = happen(fault, world(fault), tmp_path / "folder")
    assert not outcome.complaints(fault), f"{outcome.complaints(fault)}\n{outcome.output}"
    assert row(fault, outcome) in PATH.read_text(encoding="utf-8").splitlines()


def test_each_fault_has_a_line_of_its_own_on_the_page():
    assert len(FAULTS) == sum(map(len, MATRIX.values())) >= 150 and len(FAST) >= 150
    names = [line.split(" | ")[0].removeprefix("| ") for line in PATH.read_text(encoding="utf-8").splitlines()]
    assert [name for name in names if name in FAULTS] == list(FAULTS)
