"""The training step: gradient accumulation, mixed precision, and losses that are not finite."""

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
from projects_vil.engine.trainer import MAX_OVERFLOWS, TrainStep
from projects_vil.solver import clip_full_model
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import message, small_config
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


def run(model, batches, tmp_path, *, clip=0.1, scaler=None, skipped=0, fused=False, sync_period=1, **options):
    """Train a step on each batch; return the step and the last metrics. A long ``sync_period`` is as on a GPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused or sync_period > 1)
    clip_full_model(optimizer, clip)
    steps = TrainStep(model, batches, optimizer, output_dir=tmp_path, sync_period=sync_period, **options)
    steps.scaler, steps.skipped = scaler or steps.scaler, skipped
    with EventStorage() as storage:
        for steps.iter in range(len(batches)):
            storage.iter = steps.iter
            steps.run_step()
        steps.flush()
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


# -- gradient accumulation -------------------------------------------------------------------------


@pytest.fixture
def float64_proposals(monkeypatch):
    """Run detectron2's NMS in float64: it passes float32 boxes with scores of any dtype, which torchvision refuses."""

    def suppress(boxes, scores, *others):
        return batched_nms(boxes, scores.float(), *others)

    monkeypatch.setattr(proposal_utils, "batched_nms", suppress)


@pytest.mark.slow
@pytest.mark.parametrize("detector, objects, options", [("retinanet", None, []), ("mask_rcnn", 2, ALL_PROPOSALS)])
def test_eight_micro_batches_of_two_equal_a_batch_of_sixteen(detector, objects, options, tmp_path, float64_proposals):
    """In float64, with clipping and RetinaNet's loss normalizer, over two steps."""
    whole = model_of(detector, *options).double()
    split, before = copy.deepcopy(whole), weights_of(whole)
    batches = [images_of(16, objects=objects), images_of(16, objects=objects, size=(96, 64))]
    _, theirs = run(whole, batches, tmp_path)
    _, ours = run(split, batches, tmp_path, accumulation_steps=8)
    terms = [name for name in theirs if "loss" in name or name == "gradient_norm"]
    assert len(terms) >= 4
    assert_close({name: ours[name] for name in terms}, {name: theirs[name] for name in terms}, 1e-9)
    assert_close(weights_of(split), weights_of(whole), 1e-9)
    assert not torch.equal(before["backbone.fpn_output5.weight"], weights_of(whole)["backbone.fpn_output5.weight"])
    assert getattr(split, "loss_normalizer", None) == getattr(whole, "loss_normalizer", None)


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


def test_a_float16_overflow_lowers_the_scale_and_repeated_ones_stop_the_run(tmp_path):
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


# -- losses and gradients that are not finite ------------------------------------------------------


@pytest.mark.parametrize(
    "detector, box_loss, reason",
    [
        ("retinanet", "smooth_l1", "loss_cls is nan, loss_box_reg is nan"),
        ("retinanet", "giou", "Predicted boxes contain NaN"),
        pytest.param("mask_rcnn", "smooth_l1", "Predicted boxes or scores contain Inf/NaN", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sync_period", [1, 9])
def test_a_nonfinite_batch_is_skipped_and_a_second_one_stops_the_run(detector, box_loss, reason, sync_period, tmp_path):
    good, bad = images_of(2, objects=2), images_of(4, objects=2)
    bad[3]["image"] = torch.full((3, 64, 96), float("inf"))
    model = model_of(detector, "MODEL.FPN.NORM", "BN", "MODEL.RETINANET.BBOX_REG_LOSS_TYPE", box_loss)
    options = {"max_nonfinite_steps": 1, "accumulation_steps": 2, "sync_period": sync_period}
    steps, _ = run(model, [good, bad], tmp_path, **options)
    assert steps.skipped == 1 and not steps.has_stepped
    assert all(value.isfinite().all() for value in model.state_dict().values())
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    assert entry["iteration"] == 1 and entry["is_skipped"]
    assert entry["reason"] == reason and entry["learning_rate"] == 0.1
    # The images of the micro-batch.
    assert [image["image_id"] for image in entry["processes"][0]["images"]] == [2, 3]
    steps._data_loader_iter_obj = iter([bad])
    before, steps.iter = weights_of(model), 2
    with EventStorage(), pytest.raises(ConfigError) as caught:
        steps.run_step()
        steps.flush()
    assert "SOLVER.MAX_NONFINITE_STEPS" in str(caught.value) and "nonfinite.json" in str(caught.value)
    assert [entry["is_skipped"] for entry in json.loads((tmp_path / "nonfinite.json").read_text())] == [True, False]
    assert_close(weights_of(model), before, 0)
    # A run starts without the entries of iterations that it repeats.
    steps.write_nonfinite(2)
    assert len(json.loads((tmp_path / "nonfinite.json").read_text())) == 1
    steps.write_nonfinite(0)
    assert not (tmp_path / "nonfinite.json").exists()


@pytest.mark.parametrize(
    "precision, max_nonfinite_steps, sync_period, accumulation_steps",
    [
        *((None, 3, 1, 2), (None, 0, 9, 1)),
        pytest.param(None, 1, 9, 1, marks=pytest.mark.slow),
        *(pytest.param(torch.float16, number, 9, 1, marks=pytest.mark.slow) for number in (0, 1)),
    ],
)
def test_a_skipped_step_changes_nothing(precision, max_nonfinite_steps, sync_period, accumulation_steps, tmp_path):
    """Weights, momentum, BatchNorm statistics and loss normalizer equal those in a run without the batch.

    If no more steps may be skipped, steps that follow before the synchronization change nothing either.
    """
    good, bad = images_of(4), images_of(4)
    bad[2]["image"] = torch.full((3, 64, 96), float("nan"))
    options = {"sync_period": sync_period, "precision": precision, "accumulation_steps": accumulation_steps}
    options["max_nonfinite_steps"] = max_nonfinite_steps
    model = model_of("retinanet", "MODEL.FPN.NORM", "BN")
    other, before = copy.deepcopy(model), weights_of(model)
    run(other, [good, good] if max_nonfinite_steps else [good], tmp_path, **options)
    if max_nonfinite_steps:
        ours, _ = run(model, [good, bad, good], tmp_path, **options)
        assert ours.has_stepped and ours.skipped == 1
        # Only overflows lower the scale.
        assert ours.scaler is None or ours.scaler.get_scale() == 2.0**16
    else:
        with pytest.raises(ConfigError, match="iteration 1 .*loss_cls is nan"):
            run(model, [good, bad, good], tmp_path, **options)
    assert_same_update(weights_of(model), weights_of(other), before)
    if sync_period == 1:
        assert model.loss_normalizer == pytest.approx(other.loss_normalizer, rel=1e-3)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    assert entry["iteration"] == 1 and len(entry["processes"][0]["images"]) == 4 // accumulation_steps


@pytest.mark.parametrize("sync_period", [1, 9])
def test_a_nonfinite_gradient_with_a_finite_loss(sync_period, tmp_path):
    """Without clipping too. The whole batch is listed."""
    model = model_of("retinanet")
    model.head.cls_score.weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    before = weights_of(model)
    with pytest.raises(ConfigError, match="gradient"):
        run(model, [images_of(4)] * 2, tmp_path, sync_period=sync_period, clip=math.inf, accumulation_steps=2)
    assert_close(weights_of(model), before, 0)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    assert len(entry["processes"][0]["images"]) == 4 and entry["processes"][0]["losses"]["loss_cls"] > 0


# -- synchronizing every few iterations, with a fused optimizer as on a GPU ------------------------


@pytest.mark.parametrize("precision", slow_except([None, torch.float16], [torch.float16]))
def test_the_synchronization_period_does_not_change_the_result(precision, tmp_path):
    batches = [images_of(4), images_of(2, size=(96, 64))]
    model = model_of("retinanet", "MODEL.FPN.NORM", "BN")
    other, before = copy.deepcopy(model), weights_of(model)
    # The number of skipped steps may already exceed SOLVER.MAX_NONFINITE_STEPS, if a resumed run lowers it.
    options = {"precision": precision, "accumulation_steps": 2, "skipped": 3}
    steps, ours = run(model, batches, tmp_path, sync_period=9, **options)
    _, theirs = run(other, batches, tmp_path, **options)
    assert steps.has_stepped and steps.skipped == 3 and ours.keys() == theirs.keys()
    names = [name for name in ours if "time" not in name]
    assert {"gradient_norm", "total_loss"} <= set(names)
    assert_close({name: ours[name] for name in names}, {name: theirs[name] for name in names}, 1e-2)
    assert_same_update(weights_of(model), weights_of(other), before)


@pytest.mark.slow
@pytest.mark.parametrize("sync_period", [1, 9])
def test_momentum_after_a_first_step_without_effect(sync_period, tmp_path, monkeypatch):
    """torch leaves the momentum of a fused optimizer undefined after such a step."""
    # detectron2 averages the number of positive anchors over all steps, including those without effect.
    monkeypatch.setattr(RetinaNet, "_ema_update", lambda self, name, _, first: setattr(self, name, first) or first)
    model, good = model_of("retinanet"), images_of(2)
    other, before = copy.deepcopy(model), weights_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-90)
    options = {"sync_period": sync_period, "precision": torch.float16, "fused": True}
    run(model, [good, good, good], tmp_path, scaler=scaler, **options)
    run(other, [good, good], tmp_path, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), **options)
    assert_same_update(weights_of(model), weights_of(other), before)


# -- several processes -----------------------------------------------------------------------------


def _two_steps(folder, accumulation_steps, sync_period):
    """Train on a good batch, and on one with a non-finite loss in the second process."""
    rank, all_gather = comm.get_rank(), comm.all_gather
    model, ddp = model_of("retinanet").double(), {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    model = torch.nn.parallel.DistributedDataParallel(model, **ddp)
    good = images_of(8, objects=2)[4 * rank : 4 * rank + 4]
    bad = images_of(4, objects=2)
    if rank == 1:
        bad[1]["image"] = torch.full((3, 64, 96), float("nan"))
    options = {"accumulation_steps": accumulation_steps, "sync_period": sync_period}
    comm.all_gather = None
    run(model, [good], folder, **options)
    comm.all_gather = all_gather
    torch.save(weights_of(model.module), f"{folder}/{rank}_{accumulation_steps}.pth")
    before = weights_of(model)
    assert "loss_cls is nan" in message(run, model, [bad], folder, **options)
    assert_close(weights_of(model), before, 0)


@pytest.mark.slow
@pytest.mark.parametrize("sync_period, accumulations", [(1, (1, 2)), (9, (1,))])
def test_processes_stop_together(sync_period, accumulations, tmp_path):
    """Both processes stop and have the same weights, with gradient accumulation and without.

    Only a failed iteration gathers objects, because that waits for all processes.
    """
    weights = {}
    for number in accumulations:
        in_processes(2, _two_steps, tmp_path, number, sync_period, store=tmp_path / f"store{number}")
        weights[number], other = (torch.load(tmp_path / f"{rank}_{number}.pth", weights_only=True) for rank in (0, 1))
        assert_close(weights[number], other, 0)
        assert_close(weights[1], other, 1e-9)
    (entry,) = json.loads((tmp_path / "nonfinite.json").read_text())
    # The micro-batch with the loss, and the whole batch of the other process.
    assert [len(process["images"]) for process in entry["processes"]] == [4, 4 // number]
    assert entry["processes"][1]["images"][1]["image_id"] == 1
