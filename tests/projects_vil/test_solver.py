"""Parameter groups, clipping, learning-rate schedules, and SOLVER.EPOCHS."""

import copy
import math
import shlex

import pytest
import torch
from torch import nn

from backbones import ConfigError
from projects_vil import build_optimizer, load_config
from projects_vil.modeling import build_on_meta
from projects_vil.solver import build_lr_scheduler, parameter_groups, resolve_schedule
from tests.projects_vil.helpers import CONFIGS, ROOT, error_of, message, run_tool, small_config

NET = "backbone.bottom_up.net"
ONE_X = ROOT / "configs/retinanet/vil_tiny_rpb_1x.yaml"


def by_name(groups: list[dict], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return weight decay and learning rate of each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


# -- parameter groups ------------------------------------------------------------------------------


@pytest.mark.parametrize("name, variant", [("retinanet", "vil_tiny_1_1_3_1_rpb"), ("mask_rcnn", "vil_tiny_1_1_3_1")])
def test_only_weights_of_layers_decay(name, variant):
    keys = ["MODEL.FPN.NORM", "GN", "MODEL.TRANSFORMER.VARIANT", variant, "MODEL.BACKBONE.FREEZE_AT", "2"]
    model = build_on_meta(small_config(name, *keys))
    layers = nn.Linear, nn.Conv2d, nn.ConvTranspose2d
    weights = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, layers)}
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = parameter_groups(model, base_lr=0.1, weight_decay=0.2)
    found = by_name(groups, model)
    assert found == {parameter: (0.2 if parameter in weights else 0.0, 0.1) for parameter in trainable}
    # Checkpoints number the parameters of an optimizer in the order of the model.
    order = {parameter: index for index, parameter in enumerate(model.parameters())}
    indices = [[order[parameter] for parameter in group["params"]] for group in groups]
    assert indices == [sorted(group) for group in indices] and indices == sorted(indices)
    assert len(trainable) < len(order)


def test_learning_rate_factors_are_multiplied():
    keys = ["SOLVER.LR_MULTIPLIERS", "[['*.bottom_up.*', 0.5], ['*.stages.0.*', 0.1]]", "SOLVER.BASE_LR", "1.0"]
    cfg = small_config("retinanet", *keys, "SOLVER.LAYER_DECAY", "0.5", "SOLVER.BIAS_LR_FACTOR", "3.0")
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
def test_weight_decay_keys_of_detectron2(overrides, weight, bias, norm_weight, norm_bias):
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


# -- clipping --------------------------------------------------------------------------------------


def model_with_gradients(scale: float) -> nn.Module:
    model = two_layers().double()
    for index, parameter in enumerate(model.parameters(), start=1):
        generator = torch.Generator().manual_seed(index)
        parameter.grad = scale * index * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def sgd(model: nn.Module, *clip: str) -> torch.optim.Optimizer:
    """Return SGD at a rate of 1, whose update is the gradient."""
    keys = ["SOLVER.OPTIMIZER", "SGD", "SOLVER.MOMENTUM", "0.0", "SOLVER.WEIGHT_DECAY", "0.0", "SOLVER.BASE_LR", "1.0"]
    return build_optimizer(small_config("retinanet", *keys, *clip), model)


@pytest.mark.parametrize("scale", [100.0, 1e-3])
@pytest.mark.parametrize("order", [2.0, 1.0])
def test_full_model_clipping_limits_the_norm_of_all_gradients(scale, order):
    model = model_with_gradients(scale)
    before, gradients = copy.deepcopy(model), [parameter.grad.clone() for parameter in model.parameters()]
    sgd(model, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.5", "SOLVER.CLIP_GRADIENTS.NORM_TYPE", str(order)).step()
    factor = min(1.0, 0.5 / torch.cat([gradient.flatten() for gradient in gradients]).norm(order).item())
    for old, new, gradient in zip(before.parameters(), model.parameters(), gradients, strict=True):
        torch.testing.assert_close((old - new).detach(), gradient * factor, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("enabled", ["True", "False"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_gradient_raises_an_error_and_changes_no_weight(value, enabled):
    model = model_with_gradients(value)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError):
        sgd(model, "SOLVER.CLIP_GRADIENTS.ENABLED", enabled).step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# -- schedules -------------------------------------------------------------------------------------


def rates(*overrides: str) -> list[list[float]]:
    """Return the learning rates of all groups before iterations 0 to 9 of 10, and after the last, from 0.5."""
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
    keys = ["SOLVER.POLY_LR_POWER", str(power), "SOLVER.BASE_LR_END", str(end)]
    expected = [end + (0.5 - end) * (1 - iteration / 10) ** power for iteration in range(11)]
    for values, whole in zip(rates(*keys, "SOLVER.LR_MULTIPLIERS", "[['0.*', 0.01]]"), expected, strict=True):
        assert (max(values), min(values)) == pytest.approx((whole, 0.01 * whole))
    warm = [values[0] for values in rates(*keys, "SOLVER.WARMUP_ITERS", "4", "SOLVER.WARMUP_FACTOR", "0.01")]
    assert warm[4:] == pytest.approx(expected[4:])
    assert warm[:4] == pytest.approx([0.005 + (expected[4] - 0.005) * iteration / 4 for iteration in range(4)])
    assert "SOLVER.BASE_LR_END" in message(rates, "SOLVER.BASE_LR_END", "0.6")


# -- SOLVER.EPOCHS and REFERENCE_BATCH_SIZE -----------------------------------------------------------


def plan(num_images, *overrides, config=ONE_X):
    overrides = list(map(str, overrides))
    return resolve_schedule(load_config(config, overrides), num_images, overrides[::2])


@pytest.mark.parametrize(
    "num_images, batch, epochs, expected",
    [
        # COCO images with objects. The 1x schedule of the paper has 90k iterations and steps at 60k and 80k.
        (117266, 16, 12, (87950, (58633, 78178), 1000, 7330)),
        # 63 iterations per epoch: four epochs have 200 iterations, but a twentieth of the run is longer.
        (1000, 16, 160, (10000, (6667, 8889), 500, 500)),
        (50, 8, 40, (250, (167, 222), 20, 200)),
        (7, 16, 1, (1, (), 1, 1)),
        (7, 2, 1, (4, (3,), 2, 4)),
        # With 2 iterations, both steps come after the first.
        (16, 16, 2, (2, (1,), 1, 2)),
    ],
)
def test_iterations_of_epochs(num_images, batch, epochs, expected):
    cfg, lines = plan(num_images, "SOLVER.EPOCHS", epochs, "SOLVER.IMS_PER_BATCH", batch)
    solver = cfg.SOLVER
    assert (solver.MAX_ITER, solver.STEPS, solver.WARMUP_ITERS, cfg.TEST.EVAL_PERIOD) == expected
    assert solver.CHECKPOINT_PERIOD == cfg.TEST.EVAL_PERIOD and solver.EPOCHS == 0 and cfg.is_frozen()
    # The logged overrides have the same effect.
    overrides = shlex.split(lines[1].partition(" sets ")[2])
    assert load_config(ONE_X, [*overrides, "SOLVER.IMS_PER_BATCH", str(batch)]) == cfg


def test_schedules_without_epochs_and_overrides_stay(tmp_path):
    assert resolve_schedule(load_config(ONE_X), 0) == (load_config(ONE_X), [])
    solver = plan(400, "SOLVER.EPOCHS", "8", config=CONFIGS["retinanet"])[0].SOLVER
    assert (solver.STEPS, solver.MAX_ITER, solver.WARMUP_ITERS) == ((30000,), 400, 20)
    cfg, lines = plan(400, "SOLVER.EPOCHS", 12, "SOLVER.WARMUP_ITERS", 77, "TEST.EVAL_PERIOD", 0)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS, cfg.TEST.EVAL_PERIOD) == (300, 77, 0)
    config = tmp_path / "own.yaml"
    config.write_text(f"_BASE_: {ONE_X}\nSOLVER:\n  EPOCHS: 12\n")
    cfg, _ = plan(400, "SOLVER.MAX_ITER", 20, config=config)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.EPOCHS) == (20, (60000, 80000), 0)
    assert plan(400, config=config)[0].SOLVER.MAX_ITER == 300
    assert "SOLVER.EPOCHS" in message(plan, 40, "SOLVER.EPOCHS", -1)


def test_the_tool_prints_a_table_and_overrides(datasets_root, tmp_path, monkeypatch):
    tool = "../examples/plan_schedule.py"
    lines = run_tool(tool, "--images", 50, "--epochs", "20,40", "--batch", 8)[1].splitlines()
    assert ["40", "250", "167,", "222", "20", "200", "200"] in [line.split() for line in lines]
    assert "SOLVER.IMS_PER_BATCH 8 SOLVER.EPOCHS 40" in lines
    assert lines[-1].startswith("SOLVER.MAX_ITER 250 ") and lines[-1].endswith(" SOLVER.STEPS '(167, 222)'")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_root))
    # Images without annotations are not counted.
    assert run_tool(tool, "--config-file", CONFIGS["retinanet"], "--epochs", 9)[1].startswith("16 ")
    assert "--epochs" in error_of(tool, "--images", 5, "--epochs=3,")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    assert "--images" in error_of(tool, "--epochs", 3)


def test_the_learning_rate_is_scaled_to_the_batch_once():
    keys = ["SOLVER.IMS_PER_BATCH", "4", "SOLVER.BASE_LR", "1e-3", "SOLVER.BASE_LR_END", "1e-4"]
    cfg = load_config(ONE_X, keys)
    assert resolve_schedule(cfg, 0) == (cfg, [])
    scaled, _ = resolve_schedule(load_config(ONE_X, [*keys, "SOLVER.REFERENCE_BATCH_SIZE", "16"]), 0)
    assert (scaled.SOLVER.BASE_LR, scaled.SOLVER.BASE_LR_END) == (2.5e-4, 2.5e-5)
    assert resolve_schedule(scaled, 0) == (scaled, [])
