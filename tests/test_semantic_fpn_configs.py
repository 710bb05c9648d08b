"""The configs of Semantic FPN say what LIT section 4.4 says, build, and start to train."""

from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model

from projects_vil import load_config
from projects_vil.data import IGNORED_LABEL, build_mapper
from projects_vil.solver import build_lr_scheduler, build_optimizer

ROOT = Path(__file__).resolve().parents[1]
LEAVES = {"lit_ti": ("41.3", 0.1, 24), "lit_s": ("41.7", 0.2, 32)}
# The official segmentation code norms stage 1 of LIT-S too.
VARIANT = {"lit_ti": "lit_ti", "lit_s": "lit_s_seg"}
DEMO = "configs/demo/semantic_fpn_vil_shapes.yaml"


def leaf(name: str) -> str:
    return f"configs/semantic_fpn/{name}.yaml"


def test_all_sizes_of_the_paper_are_there():
    assert {path.stem for path in ROOT.glob("configs/semantic_fpn/*.yaml")} == set(LEAVES)


@pytest.mark.parametrize("path", [*map(leaf, LEAVES), DEMO])
def test_first_comment_is_the_command_for_this_file(path):
    lines = (ROOT / path).read_text().splitlines()
    assert lines[0].startswith(f"# python tools/train_net.py --config-file {path} ")
    assert path == DEMO or len(lines) < 20


@pytest.mark.parametrize("name", LEAVES)
def test_what_the_paper_says(name):
    cfg = load_config(ROOT / leaf(name))
    miou, drop_path, _ = LEAVES[name]
    assert f"mIoU {miou} in Table 8" in (ROOT / leaf(name)).read_text()
    assert (cfg.MODEL.TRANSFORMER.NAME, cfg.MODEL.TRANSFORMER.DROP_PATH) == (VARIANT[name], drop_path)
    solver = cfg.SOLVER
    assert (solver.OPTIMIZER, solver.BASE_LR, solver.WEIGHT_DECAY, solver.IMS_PER_BATCH) == ("ADAMW", 1e-4, 1e-4, 16)
    assert (solver.LR_SCHEDULER_NAME, solver.POLY_LR_POWER, solver.MAX_ITER) == ("WarmupPolyLR", 0.9, 80_000)
    assert (solver.WARMUP_ITERS, solver.CLIP_GRADIENTS.ENABLED) == (0, False)
    assert solver.LR_MULTIPLIERS == [["*.patch_embed.offset.*", 0.01]]
    crop = cfg.INPUT.CROP
    assert (crop.ENABLED, crop.TYPE, crop.SIZE, crop.SINGLE_CATEGORY_MAX_AREA) == (True, "absolute", [512, 512], 0.75)
    assert (cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING) == ((256, 1024), "range")
    assert (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST, cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE) == (512, 2048, 2048)
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("ade20k_train",), ("ade20k_val",))
    assert cfg.TEST.EVAL_PERIOD == solver.CHECKPOINT_PERIOD == 8000


@pytest.mark.parametrize("name", LEAVES)
def test_what_the_official_configuration_says(name):
    """LIT's segmentation/configs/_base_: datasets/ade20k.py and schedules/schedule_80k.py, value by value."""
    cfg = load_config(ROOT / leaf(name))
    # Resize: img_scale (2048, 512), ratio_range (0.5, 2.0); at testing img_scale (2048, 512)
    assert cfg.INPUT.MIN_SIZE_TRAIN == (0.5 * 512, 2.0 * 512) and cfg.INPUT.MAX_SIZE_TRAIN == 2.0 * 2048
    assert (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST) == (512, 2048)
    # RandomCrop: crop_size (512, 512), cat_max_ratio 0.75; Pad after Normalize: crop_size, pad_val 0, seg_pad_val 255
    crop = cfg.INPUT.CROP
    assert (list(crop.SIZE), crop.SINGLE_CATEGORY_MAX_AREA, crop.PAD) == ([512, 512], 0.75, True)
    mapper = build_mapper(cfg, is_train=True)
    assert (mapper.padded_size, mapper.pixel_mean, IGNORED_LABEL) == ((512, 512), cfg.MODEL.PIXEL_MEAN, 255)
    # RandomFlip: prob 0.5; PhotoMetricDistortion after it
    assert (cfg.INPUT.RANDOM_FLIP, cfg.INPUT.PHOTOMETRIC_DISTORTION) == ("horizontal", True)
    kinds = ["ResizeShortestEdge", "RandomCrop_CategoryAreaConstraint", "RandomFlip", "PhotometricDistortion"]
    assert [type(augmentation).__name__ for augmentation in mapper.augmentations.augs] == kinds
    assert mapper.augmentations.augs[2].prob == 0.5
    # Normalize: mean, std, to_rgb True
    assert (cfg.MODEL.PIXEL_MEAN, cfg.INPUT.FORMAT) == ([123.675, 116.28, 103.53], "RGB")
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    # lr_config: poly, power 0.9, min_lr 1e-6, by_epoch False; max_iters 80000; interval 8000
    assert (cfg.SOLVER.POLY_LR_POWER, cfg.SOLVER.BASE_LR_END, cfg.SOLVER.MAX_ITER) == (0.9, 1e-6, 80_000)
    schedule = build_lr_scheduler(cfg, torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=cfg.SOLVER.BASE_LR))
    for iteration in (0, 1, 40_000, 79_999):
        schedule.last_epoch = iteration
        expected = (1e-4 - 1e-6) * (1 - iteration / 80_000) ** 0.9 + 1e-6
        assert schedule.get_lr() == pytest.approx([expected], rel=1e-9)


def test_the_demo_has_neither_padding_nor_other_colours():
    cfg = load_config(ROOT / DEMO)
    assert not cfg.INPUT.CROP.PAD and not cfg.INPUT.PHOTOMETRIC_DISTORTION


def test_what_is_shared_with_the_detectors():
    ours = load_config(ROOT / "configs/base/semantic_fpn.yaml")
    detectors = load_config(ROOT / "configs/base/common.yaml")
    assert ours.INPUT.FORMAT == detectors.INPUT.FORMAT
    assert ours.MODEL.PIXEL_MEAN == detectors.MODEL.PIXEL_MEAN and ours.MODEL.PIXEL_STD == detectors.MODEL.PIXEL_STD


@pytest.mark.parametrize("path", [*map(leaf, LEAVES), DEMO])
def test_builds_with_optimizer_and_schedule(path):
    cfg = load_config(ROOT / path, ["MODEL.DEVICE", "meta"])
    with torch.device("meta"):
        model = build_model(cfg)
    head = model.sem_seg_head
    assert head.in_features == ["p2", "p3", "p4", "p5"] and head.ignore_value == 255 and head.loss_weight == 1
    assert head.predictor.out_channels == cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES == (4 if path == DEMO else 150)
    assert head.predictor.in_channels == (64 if path == DEMO else 128)
    assert all(parameter.requires_grad for parameter in model.parameters())
    optimizer = build_optimizer(cfg, model)
    build_lr_scheduler(cfg, optimizer)
    if path != DEMO:
        # LIT Table 8, in millions, as printed.
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert round(parameters / 1e6) == LEAVES[Path(path).stem][2]
        assert {round(group["lr"], 12) for group in optimizer.param_groups} == {1e-4, 1e-6}


def test_every_parameter_gets_a_gradient_and_any_size_a_map():
    cfg = load_config(ROOT / DEMO)
    torch.manual_seed(0)
    model = build_model(cfg)
    batch = [
        {"image": 255 * torch.rand(3, height, width), "sem_seg": torch.randint(0, 4, (height, width))}
        for height, width in [(70, 101), (64, 90)]
    ]
    batch[0]["sem_seg"][:9] = 255
    losses = model.train()(batch)
    assert losses.keys() == {"loss_sem_seg"}
    losses["loss_sem_seg"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        (output,) = model.eval()([{"image": torch.rand(3, 70, 101), "height": 35, "width": 50}])
    assert output["sem_seg"].shape == (4, 35, 50)
