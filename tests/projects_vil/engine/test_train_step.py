"""One step: gradient accumulation, mixed precision, and batches that diverge."""

import copy
import json
import math

import pytest
import torch
from detectron2.layers import batched_nms
from detectron2.modeling import RetinaNet, build_model
from detectron2.modeling.proposal_generator import proposal_utils
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from backbones import ConfigError
from projects_vil.engine.trainer import MAX_OVERFLOWS, DeferredStep, TrainStep
from projects_vil.solver import clip_full_model
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import small_config
from tests.selection import slow_except

# All anchors and proposals are taken, and each image has as many: what is sampled depends on no random number.
ALL_PROPOSALS = [
    *("MODEL.RPN.BATCH_SIZE_PER_IMAGE", "100000", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "4096"),
    *("MODEL.RPN.PRE_NMS_TOPK_TRAIN", "100", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "10", "MODEL.MASK_ON", "False"),
]


def images_of(number, *, objects=None, size=(64, 96)):
    """Images (3, H, W) of noise with boxes and masks on them: ``objects`` each, or 0 to 3."""
    generator = torch.Generator().manual_seed(3)
    height, width = size
    images = []
    for index in range(number):
        count = index % 4 if objects is None else objects
        corners = torch.rand(count, 2, generator=generator) * torch.tensor([width / 2, height / 2])
        sides = 8 + torch.rand(count, 2, generator=generator) * 20
        instances = Instances(size)
        instances.gt_boxes = Boxes(torch.cat([corners, corners + sides], dim=1))
        instances.gt_classes = torch.arange(count) % 3
        masks = torch.zeros(count, height, width, dtype=torch.bool)
        for mask, (left, top, right, bottom) in zip(masks, instances.gt_boxes.tensor.int().tolist(), strict=True):
            mask[top:bottom, left:right] = True
        instances.gt_masks = BitMasks(masks)
        pixels = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
        images.append({"image": pixels, "instances": instances, "image_id": index, "file_name": f"{index}.jpg"})
    return images


def model_of(detector, *overrides):
    torch.manual_seed(0)
    return build_model(small_config(detector, "INPUT.MASK_FORMAT", "bitmask", *overrides)).train()


def run(
    model, batches, tmp_path, *, clip=0.1, rate=0.1, scaler=None, step=TrainStep, skipped=0, fused=False, **options
):
    """The steps over some batches, and their metrics; those on a GPU (DeferredStep) are settled after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=fused or step is DeferredStep)
    clip_full_model(optimizer, clip)
    steps = step(model, batches, optimizer, output_dir=tmp_path, **options)
    steps.scaler, steps.skipped = scaler or steps.scaler, skipped
    with EventStorage() as storage:
        for steps.iter in range(len(batches)):
            storage.iter = steps.iter
            steps.run_step()
        if step is DeferredStep:
            steps.settle()
        return steps, {name: value for name, (value, _) in storage.latest().items()}


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = torch.as_tensor(theirs[name])
        torch.testing.assert_close(torch.as_tensor(value), other, rtol=tolerance, atol=1e-10 if tolerance else 0)


def assert_same_update(ours, theirs, before):
    """Check that weights have moved to the same values, but for 5% of the way, which rounding in float16 may change.

    A step that is missing, is repeated or has another size is a larger difference.
    """

    def distance(one, other):
        return math.sqrt(sum((one[name] - other[name]).double().square().sum().item() for name in before))

    before = {name: value for name, value in before.items() if value.is_floating_point()}
    assert 0 < distance(theirs, before) and distance(ours, theirs) <= 0.05 * distance(theirs, before)


# -- gradient accumulation---------------------------------------------------------------------------


@pytest.fixture
def float64_proposals(monkeypatch):
    """detectron2 suppresses boxes of float32 by scores of any type, and torchvision wants them to be of one."""

    def suppress(boxes, scores, *others):
        return batched_nms(boxes, scores.float(), *others)

    monkeypatch.setattr(proposal_utils, "batched_nms", suppress)


@pytest.mark.parametrize(
    "detector, objects, options",
    slow_except([("retinanet", None, []), ("mask_rcnn", 2, ALL_PROPOSALS)], ["retinanet"]),
)
def test_eight_micro_batches_of_two_equal_a_batch_of_sixteen(detector, objects, options, tmp_path, float64_proposals):
    """In float64, with clipping and RetinaNet's loss normalizer, over two steps."""
    whole = model_of(detector, *options).double()
    parts, before = copy.deepcopy(whole), weights_of(whole)
    batches = [images_of(16, objects=objects), images_of(16, objects=objects, size=(96, 64))]
    _, theirs = run(whole, batches, tmp_path)
    _, ours = run(parts, batches, tmp_path, accumulate=8)
    terms = [name for name in theirs if "loss" in name or name == "gradient_norm"]
    assert len(terms) >= 4
    assert_close({name: ours[name] for name in terms}, {name: theirs[name] for name in terms}, 1e-9)
    assert_close(weights_of(parts), weights_of(whole), 1e-9)
    assert not torch.equal(before["backbone.fpn_output5.weight"], weights_of(whole)["backbone.fpn_output5.weight"])
    assert getattr(parts, "loss_normalizer", None) == getattr(whole, "loss_normalizer", None)


# -- mixed precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_bfloat16_on_the_cpu(detector, tmp_path):
    images = images_of(2, objects=2)
    model = model_of(detector)
    torch.manual_seed(0)
    _, exact = run(copy.deepcopy(model), [images], tmp_path)
    torch.manual_seed(0)
    steps, mixed = run(model, [images], tmp_path, precision=torch.bfloat16)
    assert steps.has_stepped and steps.scaler is None and "grad_scaler" not in steps.state_dict()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 0 < abs(mixed["total_loss"] - exact["total_loss"]) < 0.05 * exact["total_loss"]
    assert mixed["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=0.2)


def test_float16_steps_and_an_overflow_is_no_divergence(tmp_path):
    """Until it has repeated so often that no scale is low enough."""
    model, images = model_of("retinanet"), images_of(2)
    _, exact = run(copy.deepcopy(model), [images], tmp_path)
    steps, metrics = run(model, [images], tmp_path, precision=torch.float16)
    assert steps.has_stepped and metrics["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=0.1)
    before = weights_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    steps, metrics = run(model, [images], tmp_path, precision=torch.float16, scaler=scaler)
    assert not steps.has_stepped and steps.overflows == 1 and steps.skipped == 0
    assert scaler.get_scale() == 2.0**99 and "total_loss" in metrics
    assert_close(weights_of(model), before, 0)
    assert not (tmp_path / "nonfinite.json").exists()
    steps.overflows = MAX_OVERFLOWS - 1
    steps._data_loader_iter_obj = iter([images])
    with EventStorage(), pytest.raises(ConfigError, match="overflowed"):
        steps.run_step()
    assert_close(weights_of(model), before, 0)


# -- what is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "detector, reason",
    [
        ("retinanet", "loss_cls is nan, loss_box_reg is nan"),
        ("mask_rcnn", "Predicted boxes or scores contain Inf/NaN."),
    ],
)
def test_a_batch_that_diverges_is_skipped_then_ends_the_run(detector, reason, tmp_path):
    good, bad = images_of(2, objects=2), images_of(4, objects=2)
    bad[3]["image"] = torch.full((3, 64, 96), float("inf"))
    model = model_of(detector, "MODEL.FPN.NORM", "BN")
    steps, _ = run(model, [good, bad], tmp_path, max_skipped=1, accumulate=2)
    assert steps.skipped == 1 and not steps.has_stepped
    assert all(value.isfinite().all() for value in model.state_dict().values())
    written = json.loads((tmp_path / "nonfinite.json").read_text())
    assert [entry["iteration"] for entry in written] == [1]
    entry = written[0]
    assert entry["reason"] == reason and entry["learning_rate"] == 0.1 and entry["is_skipped"]
    # The images of the micro-batch.
    assert [image["image_id"] for image in entry["processes"][0]["images"]] == [2, 3]
    steps._data_loader_iter_obj = iter([bad])
    before, steps.iter = weights_of(model), 2
    with EventStorage(), pytest.raises(ConfigError) as caught:
        steps.run_step()
    assert "SOLVER.MAX_NONFINITE_STEPS" in str(caught.value) and "nonfinite.json" in str(caught.value)
    assert [entry["is_skipped"] for entry in json.loads((tmp_path / "nonfinite.json").read_text())] == [True, False]
    assert_close(weights_of(model), before, 0)


def test_a_skipped_step_changes_nothing(tmp_path):
    """Weights, momentum, statistics of BatchNorm and the normaliser are those of a run that never saw it."""
    good, bad = images_of(4), images_of(4)
    bad[2]["image"] = torch.full((3, 64, 96), float("nan"))
    model = model_of("retinanet", "MODEL.FPN.NORM", "BN").double()
    other = copy.deepcopy(model)
    ours, _ = run(model, [good, bad, good], tmp_path, max_skipped=3, accumulate=2)
    theirs, _ = run(other, [good, good], tmp_path, max_skipped=3, accumulate=2)
    momenta = [steps.optimizer.state_dict()["state"] for steps in (ours, theirs)]
    assert_close(weights_of(model), weights_of(other), 1e-9)
    torch.testing.assert_close(momenta[0], momenta[1])
    assert model.loss_normalizer == pytest.approx(other.loss_normalizer)


@pytest.mark.parametrize("step", [TrainStep, DeferredStep])
def test_a_gradient_that_is_not_finite_with_a_loss_that_is(step, tmp_path):
    """Without clipping too. The whole batch is named."""
    model = model_of("retinanet")
    model.head.cls_score.weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    before = weights_of(model)
    with pytest.raises(ConfigError, match="gradients"):
        run(model, [images_of(4)] * 2, tmp_path, step=step, clip=math.inf, accumulate=2)
    assert_close(weights_of(model), before, 0)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    assert len(entry["processes"][0]["images"]) == 4 and entry["processes"][0]["losses"]["loss_cls"] > 0


def test_a_resumed_run_removes_what_it_repeats(tmp_path):
    path = tmp_path / "nonfinite.json"
    path.write_text(json.dumps([{"iteration": 3}, {"iteration": 8}]))
    model = torch.nn.Linear(1, 1)
    steps = TrainStep(model, [], torch.optim.SGD(model.parameters(), lr=1.0), output_dir=tmp_path)
    steps.start(8)
    assert json.loads(path.read_text()) == [{"iteration": 3}]
    steps.start(0)
    assert not path.exists()


# -- the step on a GPU: a fused optimizer, and the host learns of everything later ------------------


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_a_deferred_step_equals_one_that_waits(precision, tmp_path):
    batches = [images_of(4), images_of(2, size=(96, 64))]
    model = model_of("retinanet", "MODEL.FPN.NORM", "BN")
    other, before = copy.deepcopy(model), weights_of(model)
    steps, ours = run(model, batches, tmp_path, step=DeferredStep, precision=precision, accumulate=2)
    _, theirs = run(other, batches, tmp_path, precision=precision, accumulate=2)
    assert steps.has_stepped and ours.keys() == theirs.keys()
    names = [name for name in ours if "time" not in name]
    assert {"gradient_norm", "total_loss"} <= set(names)
    assert_close({name: ours[name] for name in names}, {name: theirs[name] for name in names}, 1e-2)
    assert_same_update(weights_of(model), weights_of(other), before)


def test_a_fused_optimizer_clips_unscaled_gradients(tmp_path):
    """In steps that wait, too."""
    model, images = model_of("retinanet"), images_of(2)
    other, before = copy.deepcopy(model), weights_of(model)
    _, ours = run(model, [images], tmp_path, precision=torch.float16, fused=True)
    _, theirs = run(other, [images], tmp_path, precision=torch.float16)
    assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-2)
    assert_same_update(weights_of(model), weights_of(other), before)


@pytest.mark.parametrize("precision", slow_except([None, torch.float16], [None]))
@pytest.mark.parametrize("max_skipped", [0, 1])
def test_a_deferred_step_that_diverges_changes_nothing(precision, max_skipped, tmp_path):
    """Nor do those that follow before the host learns of it, where no more batches may be skipped."""
    good, bad = images_of(4), images_of(4)
    bad[2]["image"] = torch.full((3, 64, 96), float("nan"))
    options = {"precision": precision, "max_skipped": max_skipped}
    model = model_of("retinanet", "MODEL.FPN.NORM", "BN")
    other, before = copy.deepcopy(model), weights_of(model)
    if max_skipped:
        ours, _ = run(model, [good, bad, good], tmp_path, step=DeferredStep, **options)
        assert ours.has_stepped and ours.skipped == 1
        # Only overflows lower it.
        assert ours.scaler is None or ours.scaler.get_scale() == 2.0**16
    else:
        with pytest.raises(ConfigError, match="iteration 1: loss_cls is nan"):
            run(model, [good, bad, good], tmp_path, step=DeferredStep, **options)
    run(other, [good, good] if max_skipped else [good], tmp_path, step=DeferredStep, **options)
    assert_same_update(weights_of(model), weights_of(other), before)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    assert entry["iteration"] == 1 and len(entry["processes"][0]["images"]) == 4


@pytest.mark.parametrize("step", [TrainStep, DeferredStep])
def test_momentum_after_a_first_step_without_effect(step, tmp_path, monkeypatch):
    """Of a fused optimizer, where torch leaves it undefined."""
    # detectron2 averages the number of positive anchors over all steps, also over those without effect.
    monkeypatch.setattr(RetinaNet, "_ema_update", lambda self, name, value, initial_value: initial_value)
    model, good = model_of("retinanet"), images_of(2)
    other, before = copy.deepcopy(model), weights_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-90)
    options = {"step": step, "precision": torch.float16, "fused": True}
    run(model, [good, good, good], tmp_path, scaler=scaler, **options)
    run(other, [good, good], tmp_path, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), **options)
    assert_same_update(weights_of(model), weights_of(other), before)


def test_a_run_that_skipped_more_than_it_may_continues(tmp_path):
    """As one that was resumed with a lower SOLVER.MAX_NONFINITE_STEPS."""
    steps, _ = run(model_of("retinanet"), [images_of(2)], tmp_path, step=DeferredStep, skipped=3, max_skipped=1)
    assert steps.has_stepped and steps.skipped == 3


# -- several processes -----------------------------------------------------------------------------


def _two_steps(folder, accumulate, step=TrainStep):
    """A good batch, and one that diverges only in the second process."""
    rank, all_gather = comm.get_rank(), comm.all_gather
    model, options = model_of("retinanet").double(), {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    model = torch.nn.parallel.DistributedDataParallel(model, **options)
    good = images_of(8, objects=2)[4 * rank : 4 * rank + 4]
    bad = images_of(4, objects=2)
    if rank == 1:
        bad[1]["image"] = torch.full((3, 64, 96), float("nan"))
    comm.all_gather = None
    run(model, [good], folder, accumulate=accumulate, step=step)
    comm.all_gather = all_gather
    torch.save(weights_of(model.module), f"{folder}/{rank}_{accumulate}.pth")
    before = weights_of(model)
    with pytest.raises(ConfigError, match="loss_cls is nan"):
        run(model, [bad], folder, accumulate=accumulate, step=step)
    assert_close(weights_of(model), before, 0)


@pytest.mark.parametrize("step, accumulations", [(TrainStep, (1, 2)), (DeferredStep, (1,))])
def test_processes_stop_together(step, accumulations, tmp_path):
    """Both stop where one diverges, and the weights of both are the same, with gradient accumulation or not.

    No objects are gathered in an iteration that does not diverge, which would wait for all processes.
    """
    weights = {}
    for number in accumulations:
        in_processes(2, _two_steps, tmp_path, number, step, store=tmp_path / f"store{number}")
        weights[number], other = (torch.load(tmp_path / f"{rank}_{number}.pth", weights_only=True) for rank in (0, 1))
        assert_close(weights[number], other, 0)
        assert_close(weights[1], other, 1e-9)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    # The images of the micro-batch.
    assert [len(process["images"]) for process in entry["processes"]] == [4 // number] * 2
    assert entry["processes"][1]["images"][1]["image_id"] == 1
