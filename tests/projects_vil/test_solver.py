"""Parameter groups, clipping, schedules, and iterations from SOLVER.EPOCHS."""

import copy
import math
import shlex

import pytest
import torch
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from torch import nn

from backbones import ConfigError
from projects_vil import load_config
from projects_vil.modeling import build_on_meta
from projects_vil.solver import (
    build_lr_scheduler,
    build_optimizer,
    layer_decay_factors,
    parameter_groups,
    scale_learning_rate,
    schedule_by_epochs,
)
from tests.projects_vil.helpers import CONFIGS, ROOT, error_line, run_tool, small_config

NET = "backbone.bottom_up.net"
ONE_X = ROOT / "configs/retinanet/vil_tiny_rpb_1x.yaml"


def by_name(groups: list[dict], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Weight decay and learning rate of each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


# -- parameter groups ------------------------------------------------------------------------------


@pytest.mark.parametrize("name, variant", [("retinanet", "vil_tiny_1_1_3_1_rpb"), ("mask_rcnn", "vil_tiny_1_1_3_1")])
def test_weights_of_layers_decay_and_nothing_else(name, variant):
    model = build_on_meta(small_config(name, "MODEL.FPN.NORM", "GN", "MODEL.TRANSFORMER.VARIANT", variant))
    layers = nn.Linear, nn.Conv2d, nn.ConvTranspose2d
    weights = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, layers)}
    found = by_name(parameter_groups(model, base_lr=0.1, weight_decay=0.2), model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found == {parameter: (0.2 if parameter in weights else 0.0, 0.1) for parameter in found}


def test_groups_have_the_trainable_parameters_in_the_order_of_the_model():
    """Checkpoints number the parameters of an optimizer."""
    model = build_on_meta(small_config("retinanet", "MODEL.BACKBONE.FREEZE_AT", "2"))
    order = {id(p): index for index, p in enumerate(model.parameters()) if p.requires_grad}
    groups = [[order[id(p)] for p in group["params"]] for group in parameter_groups(model, base_lr=1, weight_decay=1)]
    assert groups == [sorted(group) for group in groups] and groups == sorted(groups)
    assert sum(map(len, groups)) == len(order) < len(list(model.parameters()))


def test_all_factors_are_multiplied():
    multipliers = ["SOLVER.LR_MULTIPLIERS", "[['*.bottom_up.*', 0.5], ['*.stages.0.*', 0.1]]"]
    cfg = small_config(
        "retinanet", "SOLVER.BASE_LR", "1.0", "SOLVER.LAYER_DECAY", "0.5", "SOLVER.BIAS_LR_FACTOR", "3.0", *multipliers
    )
    model = build_on_meta(cfg)
    rates = {name: lr for name, (_, lr) in by_name(build_optimizer(cfg, model).param_groups, model).items()}
    expected = {
        f"{NET}.stages.0.patch_embed.proj.weight": 0.05 * 0.5**7,
        f"{NET}.stages.0.blocks.0.mlp.fc1.bias": 0.15 * 0.5**6,
        f"{NET}.stages.2.blocks.2.mlp.fc1.weight": 0.5 * 0.5**2,
        f"{NET}.stages.3.blocks.0.mlp.fc1.bias": 1.5 * 0.5,
        "backbone.fpn_output5.weight": 1.0,
        "backbone.fpn_output5.bias": 3.0,
    }
    assert {name: rates[name] for name in expected} == pytest.approx(expected)


def test_layer_decay_equals_detectron2s_for_a_flat_model():
    features = ["MODEL.FPN.IN_FEATURES", "['stage1']", "MODEL.RPN.IN_FEATURES", "['p4', 'p5', 'p6']"]
    features += ["MODEL.ROI_HEADS.IN_FEATURES", "['p4', 'p5']", "MODEL.ANCHOR_GENERATOR.SIZES", "[[32, 64, 128]]"]
    cfg = small_config("mask_rcnn", "MODEL.TRANSFORMER.VARIANT", "evit_full_16_tiny", *features)
    factors = layer_decay_factors(build_on_meta(cfg), 0.7)
    assert len(factors) > 100
    for name, factor in factors.items():
        theirs = name.replace(f"{NET}.stages.0.positions", "backbone.net.pos_embed")
        theirs = theirs.replace(f"{NET}.stages.0.global_tokens", "backbone.net.pos_embed")
        theirs = theirs.replace(f"{NET}.stages.0", "backbone.net")
        assert factor == pytest.approx(get_vit_lr_decay_rate(theirs, lr_decay_rate=0.7, num_layers=12)), name


@pytest.mark.parametrize(
    "options, named",
    [({"lr_multipliers": [["0.weigth", 2]]}, "'0.weight'"), *[({"layer_decay": d}, "layer_decay") for d in (1.5, 0.5)]],
)
def test_invalid_groups(options, named):
    with pytest.raises(ConfigError, match=named):
        parameter_groups(two_layers(), base_lr=1, weight_decay=0, **options)


@pytest.mark.parametrize(
    "overrides, weight, bias, norm_weight, norm_bias",
    [
        (["BIAS_LR_FACTOR", "2.0"], (0.3, 0.5), (0, 1.0), (0, 0.5), (0, 1.0)),
        (["WEIGHT_DECAY_BIAS", "0.1", "WEIGHT_DECAY_NORM", "0.2"], (0.3, 0.5), (0.1, 0.5), (0.2, 0.5), (0.1, 0.5)),
        (["WEIGHT_DECAY_BIAS", "None"], (0.3, 0.5), (0.3, 0.5), (0, 0.5), (0, 0.5)),
    ],
)
def test_keys_of_detectron2(overrides, weight, bias, norm_weight, norm_bias):
    keys = [token if index % 2 else f"SOLVER.{token}" for index, token in enumerate(overrides)]
    keys = ["SOLVER.WEIGHT_DECAY_BIAS", "0.0", "SOLVER.WEIGHT_DECAY", "0.3", "SOLVER.BASE_LR", "0.5", *keys]
    cfg, model = small_config("retinanet", *keys), two_layers()
    model.register_parameter("table", nn.Parameter(torch.zeros(3)))
    found = by_name(build_optimizer(cfg, model).param_groups, model)
    assert found == {
        **{"0.weight": weight, "2.weight": weight, "0.bias": bias, "2.bias": bias},
        **{"1.weight": norm_weight, "1.bias": norm_bias, "table": (0, 0.5)},
    }


def test_optimizers():
    options = ["SOLVER.MOMENTUM", "0.7", "SOLVER.NESTEROV", "True", "SOLVER.OPTIMIZER"]
    adamw, sgd = (build_optimizer(small_config("retinanet", *options, o), two_layers()) for o in ("ADAMW", "SGD"))
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(sgd, torch.optim.SGD)
    assert {(group["momentum"], group["nesterov"]) for group in sgd.param_groups} == {(0.7, True)}
    with pytest.raises(ConfigError, match="SOLVER.OPTIMIZER"):
        build_optimizer(small_config("retinanet", *options, "ADAM"), two_layers())


# -- clipping: an update of SGD at a rate of 1 is the gradient -------------------------------------


def updates(scale: float, *clip: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The updates of a step with these keys of SOLVER.CLIP_GRADIENTS, and the gradients."""
    overrides = ["SOLVER.OPTIMIZER", "SGD", "SOLVER.MOMENTUM", "0.0", "SOLVER.WEIGHT_DECAY", "0.0"]
    keys = [token if index % 2 else f"SOLVER.CLIP_GRADIENTS.{token}" for index, token in enumerate(clip)]
    model = two_layers().double()
    for index, parameter in enumerate(model.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        parameter.grad = scale * (index + 1) * values
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    before = copy.deepcopy(model)
    optimizer = build_optimizer(small_config("retinanet", *overrides, "SOLVER.BASE_LR", "1.0", *keys), model)
    optimizer.step()
    found = [old - new for old, new in zip(before.parameters(), model.parameters(), strict=True)]
    return [update.detach() for update in found], gradients


def norm_of(tensors: list[torch.Tensor], order: float = 2) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm(order).item()


@pytest.mark.parametrize("scale", [100.0, 1e-3])
@pytest.mark.parametrize("order", [2.0, 1.0])
def test_full_model_clipping_bounds_the_norm_of_all_gradients(scale, order):
    found, gradients = updates(scale, "CLIP_VALUE", "0.5", "NORM_TYPE", str(order))
    factor = min(1.0, 0.5 / norm_of(gradients, order))
    torch.testing.assert_close(found, [gradient * factor for gradient in gradients], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("enabled", ["True", "False"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_raises_and_leaves_the_weights(value, enabled):
    model = two_layers()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(small_config("retinanet", "SOLVER.CLIP_GRADIENTS.ENABLED", enabled), model)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# -- schedules -------------------------------------------------------------------------------------


def rates(*overrides: str) -> list[list[float]]:
    """Learning rates of all groups before iterations 0 to 9 of 10, and after the last, from a base of 0.5."""
    base = ["SOLVER.BASE_LR", "0.5", "SOLVER.MAX_ITER", "10", "SOLVER.WARMUP_ITERS", "0"]
    cfg = small_config("semantic_fpn", *base, *overrides)
    optimizer = build_optimizer(cfg, two_layers())
    scheduler = build_lr_scheduler(cfg, optimizer)
    values = [scheduler.get_last_lr()]
    for _ in range(10):
        optimizer.step()
        scheduler.step()
        values.append(scheduler.get_last_lr())
    return values


@pytest.mark.parametrize("power, end", [(0.9, 0.0), (2.5, 0.0), (0.9, 0.1)])
def test_polynomial_decay(power, end):
    multipliers = "[['0.*', 0.01]]"
    keys = ["SOLVER.POLY_LR_POWER", str(power), "SOLVER.BASE_LR_END", str(end), "SOLVER.LR_MULTIPLIERS", multipliers]
    for iteration, values in enumerate(rates(*keys)):
        whole = end + (0.5 - end) * (1 - iteration / 10) ** power
        assert (max(values), min(values)) == pytest.approx((whole, 0.01 * whole)), iteration


def test_warm_up_meets_the_polynomial():
    values = [value[0] for value in rates("SOLVER.WARMUP_ITERS", "4", "SOLVER.WARMUP_FACTOR", "0.01")]
    decayed = [0.5 * (1 - i / 10) ** 0.9 for i in range(11)]
    assert values[4:] == pytest.approx(decayed[4:])
    assert values[:4] == pytest.approx([0.005 + (decayed[4] - 0.005) * i / 4 for i in range(4)])


def test_a_rate_that_grows():
    with pytest.raises(ConfigError, match="SOLVER.BASE_LR_END"):
        rates("SOLVER.BASE_LR_END", "0.6")


# -- SOLVER.EPOCHS and REFERENCE_BATCH_SIZE -----------------------------------------------------------


def plan(num_images, *overrides, config=ONE_X):
    overrides = list(map(str, overrides))
    return schedule_by_epochs(load_config(config, overrides), num_images, overrides[::2])


@pytest.mark.parametrize(
    "num_images, batch, epochs, expected",
    [
        # COCO's images with objects, as the paper's 1x: 90k iterations with steps at 60k and 80k.
        (117266, 16, 12, (87950, (58633, 78178), 1000, 7330)),
        # 63 iterations per epoch: two epochs are 100 iterations, a twentieth of the run more.
        (1000, 16, 80, (5000, (3333, 4444), 250, 250)),
        (50, 8, 40, (250, (167, 222), 13, 100)),
        (7, 16, 1, (1, (), 1, 1)),
        # With 2 iterations, both steps come after the first.
        (16, 16, 2, (2, (1,), 1, 2)),
    ],
)
def test_iterations_of_epochs(num_images, batch, epochs, expected):
    cfg, lines = plan(num_images, "SOLVER.EPOCHS", epochs, "SOLVER.IMS_PER_BATCH", batch)
    solver = cfg.SOLVER
    assert (solver.MAX_ITER, solver.STEPS, solver.WARMUP_ITERS, cfg.TEST.EVAL_PERIOD) == expected
    assert solver.CHECKPOINT_PERIOD == cfg.TEST.EVAL_PERIOD and solver.EPOCHS == 0 and cfg.is_frozen()
    # The logged overrides can be passed back.
    overrides = shlex.split(lines[1].partition(" is ")[2])
    assert load_config(ONE_X, [*overrides, "SOLVER.IMS_PER_BATCH", str(batch)]) == cfg


def test_other_schedules_and_overrides_stay(tmp_path):
    assert schedule_by_epochs(load_config(ONE_X), 0) == (load_config(ONE_X), [])
    solver = plan(400, "SOLVER.EPOCHS", "8", config=CONFIGS["retinanet"])[0].SOLVER
    assert (solver.STEPS, solver.MAX_ITER, solver.WARMUP_ITERS) == ((30000,), 400, 20)
    cfg, lines = plan(400, "SOLVER.EPOCHS", 12, "SOLVER.WARMUP_ITERS", 77, "TEST.EVAL_PERIOD", 0)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS, cfg.TEST.EVAL_PERIOD) == (300, 77, 0)
    config = tmp_path / "own.yaml"
    config.write_text(f"_BASE_: {ONE_X}\nSOLVER:\n  EPOCHS: 12\n")
    cfg, _ = plan(400, "SOLVER.MAX_ITER", 20, config=config)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.EPOCHS) == (20, (60000, 80000), 0)
    assert plan(400, config=config)[0].SOLVER.MAX_ITER == 300


@pytest.mark.parametrize("overrides", [(3, "SOLVER.MAX_ITER", 9), (-1,)])
def test_invalid_epochs(overrides):
    with pytest.raises(ConfigError, match="SOLVER.EPOCHS"):
        plan(40, "SOLVER.EPOCHS", *overrides)


def test_the_tool_prints_a_table_and_overrides(datasets_root, tmp_path):
    arguments = ["--images", 50, "--epochs", "20,40", "--batch", 8]
    lines = run_tool("plan_schedule.py", *arguments).stdout.splitlines()
    assert ["40", "250", "167,", "222", "13", "100", "100"] in [line.split() for line in lines]
    assert "SOLVER.IMS_PER_BATCH 8 SOLVER.EPOCHS 40" in lines
    assert lines[-1].startswith("SOLVER.MAX_ITER 250 SOLVER.STEPS '(167, 222)'")
    arguments = ["--config-file", CONFIGS["retinanet"], "--epochs", 9]
    # Without the images that have no annotation.
    assert run_tool("plan_schedule.py", *arguments, datasets_root=datasets_root).stdout.startswith("16 ")
    assert run_tool("plan_schedule.py", "--images", 5, "--epochs=3,").returncode == 2
    assert "--images" in error_line(run_tool("plan_schedule.py", "--epochs", 3, datasets_root=tmp_path))


def test_a_rate_follows_the_batch():
    keys = ["SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "1e-3", "SOLVER.BASE_LR_END", "1e-4"]
    cfg = load_config(ONE_X, keys)
    assert scale_learning_rate(cfg) == (cfg, [])
    scaled, _ = scale_learning_rate(load_config(ONE_X, [*keys, "SOLVER.REFERENCE_BATCH_SIZE", "16"]))
    assert (scaled.SOLVER.BASE_LR, scaled.SOLVER.BASE_LR_END) == (2.5e-4, 2.5e-5)
    # Not twice, where a run is resumed with its own config.
    assert scale_learning_rate(scaled) == (scaled, [])
