"""Every config loads and builds a detector and an optimizer.

tests/test_config_values.py has the settings of each model with their sources.
projects_vil/analysis/test_counting.py has the published numbers of parameters.
"""

import re
from pathlib import Path

import pytest
import torch
import yaml
from detectron2.config import CfgNode, LazyConfig
from detectron2.model_zoo import get_config
from detectron2.modeling import build_model
from torch import nn

from backbones import list_variants
from projects_vil import load_config
from projects_vil.data import IGNORED_LABEL, Mapper
from projects_vil.solver import build_optimizer, resolve_schedule
from tests.selection import slow_except

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/*/*.yaml") if path.parent.name != "base")
# One config per family, detector and type of head. The others have the same parts.
FAST = {
    *(f"configs/retinanet/{name}_1x.yaml" for name in ("vil_tiny_rpb", "vil_tiny", "lit_ti", "litv2_s")),
    *("configs/mask_rcnn/vil_small_rpb_1x.yaml", "configs/mask_rcnn/performer_small_1x.yaml"),
    *("configs/demo/retinanet_vil_shapes.yaml", "configs/semantic_fpn/lit_s_seg.yaml"),
    *("configs/modern/cascade_mask_rcnn_lit_s.yaml", "configs/projects/point_rend_vil_tiny_rpb_1x.yaml"),
}


def build_on_meta(path: str, *overrides: str) -> tuple[CfgNode, nn.Module]:
    cfg = load_config(ROOT / path, ["MODEL.DEVICE", "meta", *overrides])
    with torch.device("meta"):
        return cfg, build_model(cfg)


def test_a_config_is_named_after_the_variant_that_it_builds():
    """A file name has the variant, after the detector in folders of several detectors, and before the schedule."""
    for path in CONFIGS:
        folder, stem = Path(path).parent.name, Path(path).stem
        if folder == "demo":
            # Named after the family: small models without a paper, or published sizes for a few minutes.
            continue
        variant = CfgNode.load_yaml_with_base(str(ROOT / path))["MODEL"]["TRANSFORMER"]["VARIANT"]
        # A Performer that starts from the weights of a partial Performer.
        stem = stem.replace("performer_from_partial", "performer")
        detector = "(cascade_mask_rcnn|mask_rcnn|panoptic_fpn|point_rend)_" if folder in ("modern", "projects") else ""
        variant = variant.removeprefix("timm:")
        assert re.fullmatch(rf"{detector}{variant}(_all)?(_1x|_3x_ms)?", stem), path
    for path in ROOT.glob("configs/lazy/*.py"):
        bottom_up = LazyConfig.load(str(path)).model.backbone.bottom_up
        assert re.fullmatch(f"(retinanet|mask_rcnn)_{bottom_up.name}", path.stem), path


@pytest.mark.parametrize("path", slow_except(CONFIGS, FAST))
def test_a_config_builds_its_detector_and_optimizer(path):
    cfg, model = build_on_meta(path)
    variant = cfg.MODEL.TRANSFORMER.VARIANT
    assert variant in list_variants() or variant == "timm:tf_efficientnet_lite0"
    features = model.backbone.output_shape()
    assert all(shape.stride == 2 ** int(name[1]) for name, shape in features.items())
    assert {shape.channels for shape in features.values()} == {cfg.MODEL.FPN.OUT_CHANNELS}
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        assert list(features) == ["p3", "p4", "p5", "p6", "p7"]
    elif "semantic" not in path:
        assert list(features) == ["p2", "p3", "p4", "p5", "p6"] and model.roi_heads.mask_on
    # It raises an error if a pattern of SOLVER.LR_MULTIPLIERS matches nothing.
    groups = build_optimizer(cfg, model).param_groups
    if cfg.SOLVER.LAYER_DECAY != 1:
        return
    # LIT's offsets have a hundredth of the learning rate (LIT section 4.1: 1e-5 and 1e-3).
    slow = {id(p) for group in groups if group["lr"] < cfg.SOLVER.BASE_LR / 2 for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in slow}
    stage = "backbone.bottom_up.net.stages"
    offsets = {f"{stage}.{i}.patch_embed.offset.{leaf}" for i in (1, 2, 3) for leaf in ("weight", "bias")}
    is_lit = cfg.MODEL.TRANSFORMER.VARIANT.startswith("lit")
    assert names == (offsets if is_lit else set())
    assert {round(group["lr"] / cfg.SOLVER.BASE_LR, 6) for group in groups} == ({0.01, 1.0} if is_lit else {1.0})


_RECIPES = [(detector, schedule) for detector in ("retinanet", "mask_rcnn") for schedule in ("1x", "3x_ms")]
_SIZES = [name for name in list_variants() if name.startswith(("ls_", "cvt_", "lit", "vil_")) and name.count("_") < 4]


@pytest.mark.parametrize("name", slow_except(_SIZES, ["ls_small", "cvt_ls_13", "lit_m", "litv2_s", "vil_base_wide"]))
@pytest.mark.parametrize("detector, schedule", _RECIPES)
def test_every_variant_has_a_recipe(name, detector, schedule):
    family = next((f"{family}_" for family in ("lit", "cvt") if name.startswith(family)), "")
    path = f"configs/base/{family}{detector}_{schedule}.yaml"
    cfg, model = build_on_meta(path, "MODEL.TRANSFORMER.VARIANT", name)
    levels = range(3, 8) if detector == "retinanet" else range(2, 7)
    assert list(model.backbone.output_shape()) == [f"p{n}" for n in levels]
    assert cfg.SOLVER.MAX_ITER == (90_000 if schedule == "1x" else 270_000)
    assert cfg.MODEL.TRANSFORMER.CHUNK_SIZE == ([16, 8, 4] if family == "cvt_" else [])
    assert cfg.MODEL.TRANSFORMER.NORM == ("SyncBN" if family else "")
    assert len(build_optimizer(cfg, model).param_groups) > 1


def test_the_cascade_is_detectron2s():
    """The configs differ as detectron2's Cascade and plain Mask R-CNN, with the default thresholds."""
    names = ("Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml", "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml")
    theirs, plain = (get_config(name).MODEL for name in names)
    nodes = [name for name, node in theirs.items() if isinstance(node, CfgNode)]
    changed = {name: {key: value for key, value in theirs[name].items() if value != plain[name][key]} for name in nodes}
    expected = {name: keys for name, keys in changed.items() if keys}
    expected["ROI_BOX_CASCADE_HEAD"] = {"IOUS": list(theirs.ROI_BOX_CASCADE_HEAD.IOUS)}
    assert yaml.safe_load((ROOT / "configs/base/cascade.yaml").read_text()) == {"MODEL": expected}


@pytest.mark.parametrize("path", [path for path in CONFIGS if "/modern/" in path])
def test_the_modern_configs(path):
    """The values match detectron2's ``mask_rcnn_R_50_FPN_50ep_LSJ.py``, and ViTDet's layer decay for 12 blocks."""
    theirs = get_config("new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ.py")
    cfg, model = build_on_meta(path)
    resize, crop, _ = theirs.dataloader.train.mapper.augmentations
    assert (cfg.INPUT.AUGMENTATION, cfg.INPUT.LSJ.SCALE) == ("lsj", (resize.min_scale, resize.max_scale))
    assert [cfg.INPUT.LSJ.SIZE] * 2 == [resize.target_height, resize.target_width] == list(crop.crop_size)
    planned, _ = resolve_schedule(cfg, 117_266)
    epochs = theirs.train.max_iter * theirs.dataloader.train.total_batch_size / 118_000
    assert cfg.SOLVER.EPOCHS == round(epochs) == 50 and planned.SOLVER.MAX_ITER == 366_457
    steps = [step / planned.SOLVER.MAX_ITER for step in planned.SOLVER.STEPS]
    milestones = [step / theirs.train.max_iter for step in theirs.lr_multiplier.scheduler.milestones]
    assert steps == pytest.approx(milestones, abs=1e-4)
    assert cfg.MODEL.EMA == {"ENABLED": True, "DECAY": 0.9998}
    # mask_rcnn_vitdet_b_100ep.py
    net = model.backbone.bottom_up.net
    assert (net.num_layers, cfg.SOLVER.LAYER_DECAY) == (12, 0.7)


@pytest.mark.parametrize("name, millions", [("lit_ti", 24), ("lit_s_seg", 32)])
def test_semantic_fpn_is_the_official_configuration(name, millions):
    """Every value matches LIT's segmentation/configs/_base_/{datasets/ade20k.py,schedules/schedule_80k.py}.

    LIT Table 8 has the parameters in whole millions.
    """
    cfg, model = build_on_meta(f"configs/semantic_fpn/{name}.yaml")
    assert millions - 0.5 <= sum(parameter.numel() for parameter in model.parameters()) / 1e6 < millions + 1
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("ade20k_train",), ("ade20k_val",))
    # Resize: img_scale (2048, 512), ratio_range (0.5, 2.0); in testing img_scale (2048, 512)
    assert (cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING) == ((0.5 * 512, 2.0 * 512), "range")
    assert (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST, cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE) == (512, 2048, 2048)
    # RandomCrop: crop_size (512, 512), cat_max_ratio 0.75; Pad after Normalize: crop_size, pad_val 0, seg_pad_val 255
    crop = cfg.INPUT.CROP
    assert (list(crop.SIZE), crop.SINGLE_CATEGORY_MAX_AREA, crop.PAD) == ([512, 512], 0.75, True)
    mapper = Mapper(cfg, is_train=True)
    assert (mapper.padded_size, mapper.pixel_mean, IGNORED_LABEL) == ((512, 512), cfg.MODEL.PIXEL_MEAN, 255)
    # RandomFlip: prob 0.5; PhotoMetricDistortion after it
    transforms = [getattr(one, "tfm", one) for one in mapper.augmentations.augs]
    types = ["ResizeShortestEdge", "RandomCrop_CategoryAreaConstraint", "RandomFlip", "ColorAugSSDTransform"]
    assert [type(transform).__name__ for transform in transforms] == types and mapper.augmentations.augs[2].prob == 0.5
    head = model.sem_seg_head
    assert head.in_features == ["p2", "p3", "p4", "p5"] and (head.ignore_value, head.loss_weight) == (255, 1)
    assert (head.predictor.out_channels, head.predictor.in_channels) == (150, 128)
