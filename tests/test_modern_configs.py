"""The recipe of detectron2's newer baselines, on our backbones: each value beside its source."""

from pathlib import Path

import pytest
from detectron2.model_zoo import get_config

from projects_vil import load_config
from projects_vil.config import detector_name
from projects_vil.modeling import build_on_meta
from projects_vil.solver import build_optimizer, schedule_by_epochs

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"vil_small": "vil_small_rpb", "ls_small": "ls_small", "lit_s": "lit_s"}
DETECTORS = {"mask_rcnn": "Mask R-CNN", "cascade_mask_rcnn": "Cascade Mask R-CNN"}
CONFIGS = [f"configs/modern/{detector}_{model}.yaml" for detector in DETECTORS for model in VARIANTS]
every_config = pytest.mark.parametrize("path", CONFIGS)
# Images of train2017 with annotations.
IMAGES = 117_266


def test_all_are_there():
    assert sorted(CONFIGS) == sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/modern/*"))


@every_config
def test_a_leaf_is_short_and_begins_with_its_command(path):
    lines = (ROOT / path).read_text().splitlines()
    assert len(lines) < 20
    assert lines[0].startswith(f"# python tools/train_net.py --config-file {path} ")


@every_config
def test_the_detector_and_its_backbone(path):
    cfg = load_config(ROOT / path)
    detector = next(name for name in sorted(DETECTORS) if path.startswith(f"configs/modern/{name}_"))
    assert detector_name(cfg) == DETECTORS[detector]
    assert (
        cfg.MODEL.TRANSFORMER.NAME == VARIANTS[path.removeprefix(f"configs/modern/{detector}_").removesuffix(".yaml")]
    )
    assert cfg.MODEL.TRANSFORMER.DROP_PATH == 0.2
    build_on_meta(cfg)


@every_config
def test_images_and_schedule_are_those_of_the_new_baselines(path):
    """``configs/new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ.py``, as detectron2's model zoo has it."""
    cfg = load_config(ROOT / path)
    theirs = get_config("new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ.py")
    resize, crop, _ = theirs.dataloader.train.mapper.augmentations
    assert (cfg.INPUT.AUGMENTATION, cfg.INPUT.LSJ.SCALE) == ("lsj", (resize.min_scale, resize.max_scale))
    assert [cfg.INPUT.LSJ.SIZE] * 2 == [resize.target_height, resize.target_width] == list(crop.crop_size)
    planned, _ = schedule_by_epochs(cfg, IMAGES)
    epochs = theirs.train.max_iter * theirs.dataloader.train.total_batch_size / 118_000
    assert cfg.SOLVER.EPOCHS == round(epochs) == 50
    steps = [step / planned.SOLVER.MAX_ITER for step in planned.SOLVER.STEPS]
    assert steps == pytest.approx(
        [step / theirs.train.max_iter for step in theirs.lr_multiplier.scheduler.milestones], abs=1e-4
    )
    assert planned.SOLVER.MAX_ITER == 366_457
    assert cfg.MODEL.EMA == {"ENABLED": True, "DECAY": 0.9998}


@every_config
def test_rates_fall_with_depth(path):
    """0.7 is that of ViTDet's mask_rcnn_vitdet_b_100ep.py, for as many blocks."""
    cfg = load_config(ROOT / path)
    model = build_on_meta(cfg)
    assert (model.backbone.bottom_up.net.num_layers, cfg.SOLVER.LAYER_DECAY) == (12, 0.7)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    net, lit = "backbone.bottom_up.net.stages", path.endswith("lit_s.yaml")
    assert cfg.SOLVER.BASE_LR == (2e-4 if lit else 1e-4)
    assert rates[f"{net}.0.patch_embed.projection.weight"] == pytest.approx(cfg.SOLVER.BASE_LR * 0.7**13)
    last = f"{net}.3.blocks.{len(model.backbone.bottom_up.net.stages[3].blocks) - 1}.mlp.expand.weight"
    assert rates[last] == pytest.approx(cfg.SOLVER.BASE_LR * 0.7)
    others = {rate for name, rate in rates.items() if not name.startswith("backbone.bottom_up.")}
    assert others == {cfg.SOLVER.BASE_LR}
    if lit:
        first = model.backbone.bottom_up.net.layer_id("stages.1.patch_embed.offset.weight")
        expected = 0.01 * cfg.SOLVER.BASE_LR * 0.7 ** (13 - first)
        assert rates[f"{net}.1.patch_embed.offset.weight"] == pytest.approx(expected)
