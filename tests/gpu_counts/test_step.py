"""Lines at which the host waits for the GPU in training. Our code waits only to write metrics."""

import inspect
import json
from pathlib import Path

import pytest

from projects_vil.engine import trainer
from tests.projects_vil.helpers import ROOT

# Limits for waits in an iteration that writes no metrics (all but two are in detectron2), and for kernel launches.
CASES = {
    ("retinanet", "bfloat16"): (7, 3350),
    ("retinanet", "float16"): (7, 3350),
    ("mask_rcnn", "bfloat16"): (118, 4000),
}


@pytest.mark.slow
@pytest.mark.parametrize(("detector", "dtype"), CASES)
def test_waits_and_launches_of_iterations(run_on_mock, detector, dtype):
    """With EMA and clipping. A Mask R-CNN has almost no proposals."""
    counts = json.loads(run_on_mock("count_step.py", detector, dtype).splitlines()[-1])
    own = {
        name: {place: number for place, number in count["waits"].items() if not place.startswith("detectron2/")}
        for name, count in counts.items()
    }
    # For two tensors that detectron2 indexes by masks: logits and deltas (retinanet.py 190 or rpn.py 417, and
    # box_regression.py 341).
    backward = {place_of(trainer.TrainStep._backward, ".backward()"): 2}
    assert own["plain"] == backward
    assert own["written"] == backward | {place_of(trainer.TrainStep.flush, "torch.cat"): 1}
    most_waits, most_launches = CASES[detector, dtype]
    plain = counts["plain"]
    assert 0 < sum(plain["waits"].values()) <= most_waits and 1000 < plain["launches"] <= most_launches


@pytest.mark.slow
def test_training_draws_ground_truth(run_on_mock):
    """detectron2 converts it to arrays, which works only for tensors on the host."""
    assert "launches" in run_on_mock("count_step.py", "mask_rcnn", "bfloat16", "VIS_PERIOD", "1")


def place_of(function, text):
    """Return the only line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + index for index, line in enumerate(lines) if text in line)
    return f"{Path(trainer.__file__).relative_to(ROOT)}:{number}"
