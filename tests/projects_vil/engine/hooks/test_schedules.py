"""What follows from the iteration, in all processes alike: random features, ViL's shifts, the rate that is shown."""

import types

import pytest
import torch
from detectron2.utils.events import EventStorage

from backbones import InputError
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from projects_vil.engine import Trainer, check_setup
from projects_vil.engine.hooks import LRScheduler, RandomShift, RedrawFeatures
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
