"""What is drawn anew by iteration, and the same in all processes: Performer's random features, and ViL's shifts."""

import math
import types

import pytest
import torch
from detectron2.utils.events import EventStorage, EventWriter

from backbones import InputError
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.engine import Trainer, check_setup
from projects_vil.engine.hooks import KeepBest, LRScheduler, RandomShift, RedrawFeatures, WriteMetrics
from tests.projects_vil.helpers import small_config


def features_of(path) -> dict[str, torch.Tensor]:
    state = torch.load(path, weights_only=True)["model"]
    return {name: tensor for name, tensor in state.items() if name.endswith("attention.features")}


@pytest.mark.slow
def test_random_features_are_redrawn_by_iteration_and_saved(shapes, tmp_path):
    """Before the third and the fifth iteration; a run that is resumed draws as one that never stopped."""
    options = ["MODEL.TRANSFORMER.NAME", "performer_tiny", "MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD", "2"]
    options += ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "5", "SOLVER.CHECKPOINT_PERIOD", "2"]
    cfg = small_config("retinanet", *options, "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "()")
    Trainer(cfg).train()
    at = {name: features_of(tmp_path / f"model_{name}.pth") for name in ("0000001", "0000003", "final")}
    first = next(iter(at["final"]))
    assert len(at["final"]) == 12
    assert not torch.equal(at["0000001"][first], at["0000003"][first])
    assert not torch.equal(at["0000003"][first], at["final"][first])
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    resumed = Trainer(cfg)
    resumed.resume_or_load(resume=True)
    resumed.train()
    assert all(torch.equal(features_of(tmp_path / "model_final.pth")[name], at["final"][name]) for name in at["final"])


def test_a_redraw_period_below_one_raises(shapes, tmp_path):
    options = ["MODEL.TRANSFORMER.NAME", "performer_tiny", "MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD", "0"]
    cfg = small_config("retinanet", *options, "OUTPUT_DIR", str(tmp_path))
    with pytest.raises(InputError, match="FEATURE_REDRAW_PERIOD is 0"):
        Trainer(cfg)


def _features_after_start(rank: int, file: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = PerformerAttention(8, num_heads=2, num_features=6)
    hook = RedrawFeatures(2)
    hook.trainer = types.SimpleNamespace(model=model, iter=0)
    hook.before_train()
    started = model.features.clone()
    hook.before_step()
    assert torch.equal(model.features, started)
    hook.trainer.iter = 2
    hook.before_step()
    torch.save([started, model.features], f"{folder}/{rank}.pth")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_have_the_same_random_features(tmp_path):
    torch.multiprocessing.spawn(_features_after_start, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def _shifts(model) -> list:
    return [module.shift for module in model.modules() if isinstance(module, SlidingChunkAttention)]


def test_shifts_follow_from_the_iteration_and_end_at_their_share():
    layers = torch.nn.ModuleList(SlidingChunkAttention(8, num_heads=2, window_size=3) for _ in range(5))
    drawn = {}
    for iterations in (range(8), range(3, 8)):
        hook = RandomShift(layers, 0.5)
        for iteration in iterations:
            hook.trainer = types.SimpleNamespace(iter=iteration, max_iter=8)
            hook.before_step()
            assert _shifts(layers) == drawn.setdefault(iteration, _shifts(layers))
    assert all((shift is None) == (iteration >= 4) for iteration, shifts in drawn.items() for shift in shifts)
    assert len({tuple(drawn[iteration]) for iteration in range(4)}) == 4


def test_shifts_of_a_config(shapes, tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path), "MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL", "0.875"]
    (hook,) = [hook for hook in Trainer(small_config("retinanet", *options))._hooks if isinstance(hook, RandomShift)]
    assert hook.until == 0.875
    options += ["MODEL.TRANSFORMER.NAME", "sra64_tiny"]
    with pytest.raises(InputError, match="RANDOM_SHIFT_UNTIL is 0.875, and no stage has sliding_chunk attention"):
        check_setup(small_config("retinanet", *options))


class _Written(EventWriter):
    def __init__(self, storage):
        self.storage, self.found = storage, []

    def write(self) -> None:
        self.found.append((self.storage.iter, dict(self.storage.latest()).get("bbox/AP", (None,))[0]))


def test_every_evaluation_is_written():
    with EventStorage() as storage:
        writer = _Written(storage)
        hook = WriteMetrics([writer], evaluation_period=3)
        for iteration in range(22):
            storage.iter = iteration
            if (iteration + 1) % 3 == 0:
                storage.put_scalar("bbox/AP", iteration, smoothing_hint=False)
            hook.trainer = types.SimpleNamespace(iter=iteration, max_iter=22)
            hook.after_step()
    assert [iteration for iteration, _ in writer.found] == [2, 5, 8, 11, 14, 17, 19, 20, 21]
    assert all(value == iteration for iteration, value in writer.found if (iteration + 1) % 3 == 0)


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


def test_the_rate_of_a_run_is_that_of_no_layer():
    """With layer-wise decay the largest group may be a layer's, whose rate detectron2 would say."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    layers = [{"params": parameters[:3], "lr": 0.05}, {"params": parameters[3:], "lr": 0.1}]
    optimizer = torch.optim.SGD(layers, lr=0.1)
    hook = LRScheduler(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5))
    with EventStorage() as storage:
        hook.trainer = types.SimpleNamespace(storage=storage)
        hook.before_train()
        hook.after_step()
        assert storage.latest()["lr"][0] == pytest.approx(0.1 * 0.5)
    # The name that detectron2 saves its state by.
    assert type(hook).__qualname__ == "LRScheduler"
