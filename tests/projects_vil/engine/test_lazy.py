"""LazyConfigs: the detectors, optimizers and rates of the YAML configs, and the same trainer."""

import json
import re
from pathlib import Path

import pytest
import torch
from detectron2.config import LazyCall, instantiate
from detectron2.data import transforms as T
from detectron2.solver import LRMultiplier

from projects_vil import load_config
from projects_vil.config import with_overrides
from projects_vil.data import seed_all
from projects_vil.engine import check_output_dir, load_records, run_lazy_config
from projects_vil.engine.launch import save_config
from projects_vil.engine.lazy import build_lazy_optimizer, lazy_options, lazy_trainer, load_lazy_config
from projects_vil.modeling import build_on_meta
from projects_vil.solver import build_lr_scheduler, build_optimizer
from tests.projects_vil.engine.test_resuming import assert_same_run, resume
from tests.projects_vil.helpers import ROOT, message

DETECTORS = ["retinanet", "mask_rcnn"]
CLASSES = {"retinanet": "model.num_classes", "mask_rcnn": "model.roi_heads.num_classes"}
SMALL = [
    *("train.device=cpu", "train.log_period=1", "model.backbone.bottom_up.name=vil_tiny_1_1_3_1_rpb"),
    *("dataloader.train.dataset.names=[shapes_train]", "dataloader.test.dataset.names=[shapes_val]"),
    *("dataloader.train.num_workers=0", "dataloader.test.num_workers=0", "dataloader.train.total_batch_size=2"),
    "dataloader.train.mapper.augmentations.0.short_edge_length=[48]",
    "dataloader.test.mapper.augmentations.0.short_edge_length=[48,48]",
]
SMALL_HEADS = {
    "retinanet": ["model.head.conv_dims=[16]", "+model.test_score_thresh=0.001"],
    "mask_rcnn": [
        *("model.proposal_generator.post_nms_topk=[50,20]", "model.roi_heads.box_predictor.test_score_thresh=0.001"),
        "model.roi_heads.batch_size_per_image=16",
    ],
}


def lazy_path(detector):
    return ROOT / f"configs/lazy/{detector}_vil_tiny_rpb.py"


def arguments(detector, *overrides) -> tuple[Path, list[str]]:
    return lazy_path(detector), [*SMALL, *SMALL_HEADS[detector], f"{CLASSES[detector]}=3", *overrides]


@pytest.fixture(params=DETECTORS)
def both(request):
    """Return the YAML config and its model, and the LazyConfig and its model, on the meta device."""
    cfg = load_config(ROOT / f"configs/{request.param}/vil_tiny_rpb_1x.yaml", ["MODEL.DEVICE", "cpu"])
    lazy = load_lazy_config(lazy_path(request.param))
    with torch.device("meta"):
        return cfg, build_on_meta(cfg), lazy, instantiate(lazy.model)


def groups_by_name(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [dict(group, fused=None) for group in optimizer.param_groups]  # only the speed depends on it
    return {frozenset(names[parameter] for parameter in group.pop("params")): group for group in groups}


def test_the_same_detector_optimizer_and_data(both):
    cfg, model, lazy, lazy_model = both
    shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (model, lazy_model)]
    assert shapes[0] == shapes[1]
    assert model.backbone.output_shape() == lazy_model.backbone.output_shape()
    assert model.backbone.size_divisibility == lazy_model.backbone.size_divisibility
    ours, theirs = build_lazy_optimizer(lazy, lazy_model), build_optimizer(cfg, model)
    assert type(ours) is type(theirs)
    assert groups_by_name(lazy_model, ours) == groups_by_name(model, theirs)
    assert sorted(group["weight_decay"] for group in ours.param_groups) == [0.0, 0.05]
    assert lazy.train.clip_norm == cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE
    assert lazy.train.max_iter == cfg.SOLVER.MAX_ITER
    ours = LRMultiplier(ours, instantiate(lazy.lr_multiplier), cfg.SOLVER.MAX_ITER)
    theirs = build_lr_scheduler(cfg, theirs)
    for iteration in (0, 1, 500, 999, 1001, 59999, 60001, 79999, 80001, 89999):
        ours.last_epoch = theirs.last_epoch = iteration
        assert ours.get_lr() == pytest.approx(theirs.get_lr())
    options, train = lazy_options(lazy, lazy_model), lazy.dataloader.train
    for node, key in (("DATASETS", "TRAIN"), ("INPUT", "FORMAT"), ("MODEL", "PIXEL_STD"), ("SOLVER", "IMS_PER_BATCH")):
        assert options[node][key] == cfg[node][key]
    assert tuple(train.mapper.augmentations[0].short_edge_length) == cfg.INPUT.MIN_SIZE_TRAIN
    assert train.dataset.masks == train.mapper.use_instance_mask == cfg.MODEL.MASK_ON
    assert lazy.train.eval_period == lazy.train.checkpointer.period == cfg.TEST.EVAL_PERIOD


def test_large_scale_jitter_as_in_the_docs(shapes):
    cfg = load_lazy_config(lazy_path("mask_rcnn"), [*SMALL, "model.roi_heads.num_classes=3"])
    (snippet,) = re.findall(r"```python\n(dataloader.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    exec(snippet.replace("1024", "96"), {"dataloader": cfg.dataloader, "L": LazyCall, "T": T})
    records = load_records(["shapes_train"], train=True, num_classes=3, masks=True)
    mapper = instantiate(cfg.dataloader.train.mapper)
    for record in list(records)[:4]:
        sample = mapper(record)
        instances = sample["instances"]
        assert sample["image"].shape == (3, 96, 96) and instances.gt_masks.tensor.shape[1:] == (96, 96)
        seen = instances.gt_masks.get_bounding_boxes().tensor
        torch.testing.assert_close(instances.gt_boxes.tensor, seen, atol=2, rtol=0)


def train(detector, output, *, cut_at=None):
    options = ["train.max_iter=4", "train.checkpointer.period=2", "train.eval_period=2", "train.seed=0"]
    options += ["train.ema.enabled=true", "train.gradient_accumulation_steps=2", "train.best_metric=bbox/AP"]
    options += ["train.num_visualized_images=0"]
    args = arguments(detector, *options, f"train.output_dir={output}")
    cfg = load_lazy_config(*args)
    seed_all(0)
    output.mkdir(exist_ok=True)
    resume(lazy_trainer(cfg)(lazy_options(cfg, instantiate(cfg.model))), cut_at=cut_at)


@pytest.mark.slow
def test_the_trainer_of_yaml_configs(shapes, tmp_path):
    """With EMA, gradient accumulation and the best checkpoint, an interrupted run equals an uninterrupted one."""
    train("retinanet", tmp_path / "whole")
    for iteration in (1, 3):
        train("retinanet", tmp_path / "cut", cut_at=iteration)
    train("retinanet", tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    final = torch.load(tmp_path / "whole/model_final.pth", weights_only=True)
    assert final["averaged_steps"] == 4 and "unaveraged_model" in final


def test_a_resume_has_the_same_data_and_batch_size(shapes, tmp_path):
    """The comparison is with the config.yaml of the run, which has Python objects."""
    cfg = load_lazy_config(*arguments("mask_rcnn", f"train.output_dir={tmp_path}"))
    options = lazy_options(cfg, instantiate(cfg.model))
    save_config(options, lazy_trainer(cfg))
    (tmp_path / "model_final.pth").touch()
    assert check_output_dir(options, resume=True)
    other = with_overrides(options, {"SOLVER.IMS_PER_BATCH": 2 * options.SOLVER.IMS_PER_BATCH})
    assert "SOLVER.IMS_PER_BATCH" in message(check_output_dir, other, resume=True)


@pytest.mark.slow
def test_the_command_line(shapes, tmp_path):
    output = tmp_path / "run"
    path, overrides = arguments("mask_rcnn", f"train.output_dir={output}", "train.max_iter=2")
    run_lazy_config(path, overrides)
    results = json.loads((output / "evaluation.json").read_text())
    assert "AP" in results["shapes_val"]["segm"]
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line.get("gradient_norm", 0) > 0] == [0, 1]
    # The config of the run is a LazyConfig itself, with the seed of the run.
    assert load_lazy_config(output / "config.yaml").train.seed >= 0
    overrides = [f"train.init_checkpoint={output / 'model_final.pth'}", f"train.output_dir={tmp_path / 'again'}"]
    run_lazy_config(output / "config.yaml", overrides, eval_only=True)
    assert json.loads((tmp_path / "again/evaluation.json").read_text()) == results


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["train.max_itr=9"], "'train.max_iter'"),
        (["train.max_iter=many"], "SOLVER.MAX_ITER"),
        (["dataloader.train.mapper.augmentations[7].short_edge_length=[48]"], "augmentations[7]"),
        (["dataloader.train.mapper.image_format=BGR"], "model.input_format"),
        (["dataloader.train.dataset.names=[shape_train]"], "'shape_train'"),
        (["dataloader.test.dataset.names=[]"], "dataloader.test.dataset.names"),
        (["+model.backbone.bottom_up.windows=3"], "windows"),
        (["optimizer.params.lr_multipliers=[[nothing.*,2]]"], "nothing.*"),
        (["model.num_classes=4"], "NUM_CLASSES"),
    ],
)
def test_mistakes(overrides, named, shapes, tmp_path):
    output = tmp_path / "run"
    given = arguments("retinanet", f"train.output_dir={output}", *overrides)
    assert named in message(run_lazy_config, *given)
    assert not output.exists()
