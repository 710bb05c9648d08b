"""Which checkpoint is the best one, and what is said where there is none."""

import math
import types

import pytest
from detectron2.utils.events import EventStorage

from projects_vil.engine.hooks import KeepBest


@pytest.mark.parametrize("evaluated, warned", [({}, False), ({"bbox/AR": 3.0}, True)])
def test_a_best_metric_is_missed_only_where_an_evaluation_gave_others(caplog, evaluated, warned):
    with EventStorage() as storage:
        storage.put_scalar("rpn/num_pos_anchors", 3.0)
        storage.put_scalars(smoothing_hint=False, **evaluated)
        hook = KeepBest(None, metric="bbox/AP")
        hook.trainer = types.SimpleNamespace(storage=storage, iter=0)
        hook.after_train()
    assert ("no evaluation gave it (bbox/AR)" in caplog.text) is warned and "rpn" not in caplog.text


class _Saved:
    """A checkpointer that notes where it is asked to save."""

    def __init__(self) -> None:
        self.iterations = []

    def save(self, name, *, iteration, **said) -> None:
        assert name == "model_best"
        self.iterations.append(iteration)


@pytest.mark.parametrize(
    "metric, values, saved",
    [
        ("bbox/AP", [math.nan, 1.0, 3.0, 3.0, 2.0, 4.0], [3, 5, 11]),
        ("validation_loss/total_loss", [5.0, 6.0, 4.0, 4.0, math.inf, 4.5], [1, 5]),
    ],
)
def test_the_best_is_saved(metric, values, saved):
    """At every other iteration; what is as good as the best is not better."""
    checkpointer = _Saved()
    with EventStorage() as storage:
        hook = KeepBest(checkpointer, metric=metric, least=metric.startswith("validation_loss"))
        for iteration in range(12):
            storage.iter = iteration
            if iteration % 2:
                storage.put_scalar(metric, values[iteration // 2], smoothing_hint=False)
            hook.trainer = types.SimpleNamespace(storage=storage, iter=iteration)
            hook.after_step()
        # After the last step an evaluation is compared once more, and counted once.
        hook.after_train()
    assert checkpointer.iterations == saved and hook.best_iteration == saved[-1]
    assert hook.waited == (11 - saved[-1]) // 2
