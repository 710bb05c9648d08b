"""Hooks: random features and shifts, the logged learning rate, and the best checkpoint."""

import math
import types

import pytest
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from backbones.attention.efficient import PerformerAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.engine.hooks import BestCheckpointer, LRScheduler, RedrawFeatures, sample_random_shifts
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import small_config


def _features_after_start(folder) -> None:
    torch.manual_seed(comm.get_rank())
    model = PerformerAttention(8, num_heads=2, num_features=6)
    hook, cfg = RedrawFeatures(), small_config("retinanet", "MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD", "2")
    found = []
    for iteration in range(3):
        hook.trainer = types.SimpleNamespace(model=model, iter=iteration, cfg=cfg)
        if iteration == 0:
            hook.before_train()
        hook.before_step()
        found.append(model.features.clone())
    torch.save(found, folder / f"{comm.get_rank()}.pth")


def test_processes_have_the_same_random_features(tmp_path):
    """Features are shared at the start and resampled every second iteration."""
    in_processes(2, _features_after_start, tmp_path, store=tmp_path / "store")
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert all(map(torch.equal, first, second)) and torch.equal(first[0], first[1]) and not torch.equal(*first[1:])


def test_random_shifts_depend_on_the_iteration_and_end_at_their_fraction():
    layers = torch.nn.ModuleList(SlidingChunkAttention(8, num_heads=2, chunk_size=3) for _ in range(5))
    found, cfg = {}, small_config("retinanet", "MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION", "0.5")
    for iterations in (range(8), range(3, 8)):
        for iteration in iterations:
            sample_random_shifts(types.SimpleNamespace(iter=iteration, max_iter=8, model=layers, cfg=cfg))
            shifts = [layer.shift for layer in layers]
            assert shifts == found.setdefault(iteration, shifts)
    assert all((shift is None) == (iteration >= 4) for iteration, shifts in found.items() for shift in shifts)
    assert len({tuple(found[iteration]) for iteration in range(4)}) == 4


def test_the_logged_learning_rate_has_no_layer_decay():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    layers = [{"params": parameters[:3], "lr": 0.05}, {"params": parameters[3:], "lr": 0.1}]
    optimizer = torch.optim.SGD(layers, lr=0.1)
    hook = LRScheduler(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5))
    with EventStorage() as storage:
        hook.trainer = types.SimpleNamespace(storage=storage)
        hook.before_train()
        hook.after_step()
        assert storage.latest()["lr"][0] == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize(
    "metric, values, expected",
    [
        ("bbox/AP", [math.nan, 1.0, 3.0, 3.0, 2.0, 4.0], [3, 5, 11]),
        ("validation_loss/total_loss", [5.0, 6.0, 4.0, 4.0, math.inf, 4.5], [1, 5]),
    ],
)
def test_the_best_checkpoint_is_saved(metric, values, expected):
    """Evaluations at every second iteration, the last after training; the run is resumed in the middle."""
    saved = []

    def save(name, *, iteration):
        assert name == "model_best"
        saved.append(iteration)

    def new_hook():
        checkpointer = types.SimpleNamespace(save=save)
        return BestCheckpointer(2, checkpointer, metric, "min" if metric.startswith("validation_loss") else "max")

    with EventStorage() as storage:
        hook = new_hook()
        for iteration in range(12):
            storage.iter = iteration
            if iteration % 2:
                storage.put_scalar(metric, values[iteration // 2], smoothing_hint=False)
            hook.trainer = types.SimpleNamespace(storage=storage, iter=iteration, max_iter=12)
            hook.after_step()
            if iteration == 6:
                state, hook = hook.state_dict(), new_hook()
                hook.load_state_dict(state)
        hook.after_train()
    assert saved == expected and hook.best_iter == expected[-1]
    assert hook.evaluations_since_best == (11 - expected[-1]) // 2
