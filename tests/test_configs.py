"""Every config loads, builds, and says what the papers and the official repository say."""

import re
from pathlib import Path

import pytest
import torch
from detectron2.config import LazyConfig, instantiate
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_anchor_generator, build_model

from backbones import list_variants
from projects_vil import load_config

ROOT = Path(__file__).resolve().parents[1]
# Of detectors; those of Semantic FPN are in test_semantic_fpn_configs.py.
CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.glob("configs/**/*.yaml")
    if path.parent.name != "base" and "semantic_fpn" not in str(path.relative_to(ROOT))
)
LEAVES = [path for path in CONFIGS if "/demo/" not in path]
VIL = [path for path in LEAVES if "/vil_" in path]
SIZES = ["vil_tiny", "vil_small", "vil_medium_deep", "vil_base_deep"]

# The official repository's README, "Model Zoo on COCO": 1x and 3x.
DROP_PATH = {
    ("retinanet", "vil_tiny"): (0.05, 0.1),
    ("retinanet", "vil_small"): (0.1, 0.2),
    ("retinanet", "vil_medium_deep"): (0.2, 0.3),
    ("retinanet", "vil_base_deep"): (0.3, 0.3),
    ("mask_rcnn", "vil_tiny"): (0.05, 0.1),
    ("mask_rcnn", "vil_small"): (0.2, 0.2),
    ("mask_rcnn", "vil_medium_deep"): (0.2, 0.3),
    ("mask_rcnn", "vil_base_deep"): (0.3, 0.3),
}
# AP of ViL Table 6 and box / mask AP of Table 7, and those of the official repository: 1x and 3x.
PUBLISHED = {
    ("retinanet", "vil_tiny"): [("38.8", "40.8"), ("40.7", "43.6")],
    ("retinanet", "vil_small"): [("41.6", "44.2"), ("42.9", "45.9")],
    ("retinanet", "vil_medium_deep"): [("42.9", "46.8"), ("43.7", "47.9")],
    ("retinanet", "vil_base_deep"): [("44.3", "47.8"), ("44.7", "48.6")],
    ("mask_rcnn", "vil_tiny"): [("38.7 / 36.2", "41.4 / 38.1"), ("41.2 / 37.9", "44.2 / 40.6")],
    ("mask_rcnn", "vil_small"): [("41.8 / 38.5", "44.9 / 41.1"), ("43.4 / 39.6", "47.1 / 42.7")],
    ("mask_rcnn", "vil_medium_deep"): [("43.4 / 39.7", "47.6 / 43.0"), ("44.6 / 40.7", "48.9 / 44.2")],
    ("mask_rcnn", "vil_base_deep"): [("45.1 / 41.0", "48.6 / 43.6"), ("45.7 / 41.3", "49.6 / 44.5")],
}


def parts(path: str) -> tuple[str, str, str]:
    """Detector, size and schedule of a leaf's path."""
    match = re.fullmatch(r"configs/(\w+)/(\w+?)_(1x|3x_ms)\.yaml", path)
    assert match, path
    return match.groups()


def parameters(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_all_detectors_sizes_and_schedules_are_there():
    expected = {(d, size, s) for d in ("retinanet", "mask_rcnn") for size in SIZES for s in ("1x", "3x_ms")}
    assert {parts(path) for path in VIL} == expected
    assert {path for path in CONFIGS if "/demo/" in path} == {
        "configs/demo/retinanet_vil_shapes.yaml",
        "configs/demo/mask_rcnn_vil_shapes.yaml",
    }


@pytest.mark.parametrize("path", CONFIGS)
def test_loads_and_builds(path):
    cfg = load_config(ROOT / path, ["MODEL.DEVICE", "meta"])
    assert cfg.MODEL.TRANSFORMER.NAME in list_variants()
    with torch.device("meta"):
        model = build_model(cfg)
    retinanet = "retinanet" in path
    assert (
        type(model).__name__
        == cfg.MODEL.META_ARCHITECTURE
        == ("RetinaNet" if retinanet else "GeneralizedRCNN")
    )
    levels = ["p3", "p4", "p5", "p6", "p7"] if retinanet else ["p2", "p3", "p4", "p5", "p6"]
    assert list(model.backbone.output_shape()) == levels
    assert {shape.channels for shape in model.backbone.output_shape().values()} == {
        cfg.MODEL.FPN.OUT_CHANNELS
    }
    assert all(parameter.requires_grad for parameter in model.parameters())
    if not retinanet:
        assert model.roi_heads.mask_on and len(model.roi_heads.mask_head.conv_norm_relus) in (2, 4)


def test_the_smallest_runs_on_the_cpu():
    model = build_model(
        load_config(ROOT / "configs/retinanet/vil_tiny_1x.yaml", ["MODEL.DEVICE", "cpu"])
    ).eval()
    with torch.no_grad():
        instances = model([{"image": torch.full((3, 70, 101), 99.0), "height": 35, "width": 50}])[0][
            "instances"
        ]
    assert instances.image_size == (35, 50)


@pytest.mark.parametrize("path", CONFIGS)
def test_first_comment_is_the_command_for_this_file(path):
    first = (ROOT / path).read_text().splitlines()[0]
    assert first.startswith(f"# python tools/train_net.py --config-file {path} ")


@pytest.mark.parametrize("path", LEAVES)
def test_leaves_are_short(path):
    assert len((ROOT / path).read_text().splitlines()) < 20


@pytest.mark.parametrize("path", CONFIGS)
def test_what_all_detectors_share(path):
    cfg = load_config(ROOT / path)
    assert cfg.INPUT.FORMAT == "RGB"
    assert cfg.MODEL.PIXEL_MEAN == [123.675, 116.28, 103.53]
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    clip = cfg.SOLVER.CLIP_GRADIENTS
    assert (clip.ENABLED, clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE) == (True, "full_model", 1.0, 2.0)
    assert (cfg.SOLVER.OPTIMIZER, cfg.SOLVER.WEIGHT_DECAY) == ("ADAMW", 0.1)
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 0


@pytest.mark.parametrize("path", VIL)
def test_schedule_of_the_paper(path):
    detector, size, schedule = parts(path)
    cfg = load_config(ROOT / path)
    assert cfg.MODEL.TRANSFORMER.NAME == f"{size}_rpb"
    assert cfg.SOLVER.BASE_LR == (8e-5 if size == "vil_base_deep" else 1e-4)
    assert cfg.SOLVER.IMS_PER_BATCH == 16
    assert (cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.GAMMA) == ("WarmupMultiStepLR", 0.1)
    long = schedule == "3x_ms"
    assert cfg.SOLVER.STEPS == ((180_000, 240_000) if long else (60_000, 80_000))
    assert cfg.SOLVER.MAX_ITER == (270_000 if long else 90_000)
    assert cfg.INPUT.MIN_SIZE_TRAIN == ((640, 672, 704, 736, 768, 800) if long else (800,))
    assert cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "choice"
    assert cfg.INPUT.MAX_SIZE_TRAIN == cfg.INPUT.MAX_SIZE_TEST == cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE == 1333
    assert cfg.INPUT.MIN_SIZE_TEST == 800
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("coco_2017_train",), ("coco_2017_val",))
    # An epoch of 117,266 images with annotations.
    assert cfg.TEST.EVAL_PERIOD == cfg.SOLVER.CHECKPOINT_PERIOD == 7330
    assert cfg.MODEL.TRANSFORMER.DROP_PATH == DROP_PATH[detector, size][long]


@pytest.mark.parametrize("path", VIL)
def test_figures_in_the_comments(path):
    detector, size, schedule = parts(path)
    comment = " ".join(
        line.lstrip("# ") for line in (ROOT / path).read_text().splitlines() if line.startswith("#")
    )
    paper, official = PUBLISHED[detector, size][schedule == "3x_ms"]
    assert f"AP {paper} in Table {6 if detector == 'retinanet' else 7} " in comment
    assert f"{official} in the official repository" in comment
    large = size in ("vil_medium_deep", "vil_base_deep")
    assert f"pretrained on ImageNet-{'21K' if large else '1K'}" in comment


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_absolute_positions_by_one_key(detector):
    cfg = load_config(
        ROOT / f"configs/{detector}/vil_tiny_1x.yaml",
        ["MODEL.TRANSFORMER.NAME", "vil_tiny", "MODEL.DEVICE", "meta"],
    )
    with torch.device("meta"):
        names = parameters(build_model(cfg))
    assert sum(name.endswith("positions.rows") for name in names) == 4
    assert not any("relative_bias" in name for name in names)


def test_lazy_config_builds_the_same_detector():
    cfg = load_config(ROOT / "configs/retinanet/vil_tiny_1x.yaml", ["MODEL.DEVICE", "meta"])
    with torch.device("meta"):
        ours = build_model(cfg)
        lazy = instantiate(LazyConfig.load(str(ROOT / "configs/lazy/retinanet_vil_tiny.py")).model)
    assert parameters(lazy) == parameters(ours)
    assert lazy.state_dict().keys() == ours.state_dict().keys()
    rates = [
        [block.drop_path_rate for stage in model.backbone.bottom_up.net.stages for block in stage.blocks]
        for model in (ours, lazy)
    ]
    assert rates[0] == rates[1]
    assert ours.backbone.output_shape() == lazy.backbone.output_shape()
    assert (ours.num_classes, ours.head_in_features) == (lazy.num_classes, lazy.head_in_features)
    assert ours.test_score_thresh == lazy.test_score_thresh and ours.smooth_l1_beta == lazy.smooth_l1_beta


def test_lazy_config_has_the_same_anchors():
    cfg = load_config(ROOT / "configs/retinanet/vil_tiny_1x.yaml")
    lazy = instantiate(
        LazyConfig.load(str(ROOT / "configs/lazy/retinanet_vil_tiny.py")).model.anchor_generator
    )
    shapes = [ShapeSpec(channels=256, stride=stride) for stride in (8, 16, 32, 64, 128)]
    ours = build_anchor_generator(cfg, shapes)
    torch.testing.assert_close(list(lazy.cell_anchors), list(ours.cell_anchors), rtol=1e-4, atol=0)


def test_lazy_config_has_the_same_pixels():
    cfg = load_config(ROOT / "configs/retinanet/vil_tiny_1x.yaml")
    lazy = LazyConfig.load(str(ROOT / "configs/lazy/retinanet_vil_tiny.py")).model
    assert list(lazy.pixel_mean) == cfg.MODEL.PIXEL_MEAN and list(lazy.pixel_std) == cfg.MODEL.PIXEL_STD
