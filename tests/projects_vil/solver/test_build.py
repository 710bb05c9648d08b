"""Which parameters decay, at which rate they learn and when, and that clipping bounds what it says."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.solver.build import get_default_optimizer_params
from torch import nn

from backbones import InputError
from projects_vil import load_config
from projects_vil.modeling import build_on_meta
from projects_vil.solver import build_optimizer, parameter_groups
from projects_vil.solver.build import undecayed_parameters
from tests.projects_vil.helpers import ROOT, small_config

VARIANTS = ["vil_tiny_1_1_3_1_rpb", "vil_tiny_1_1_3_1"]


def detector(name: str = "retinanet", *overrides: str) -> nn.Module:
    return build_model(small_config(name, "MODEL.FPN.NORM", "GN", *overrides))


def named(groups: list[dict], model: nn.Module) -> list[tuple[list[str], float, float]]:
    """Each group's parameter names, learning rate and weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


def learning_rates(groups: list[dict], model: nn.Module) -> dict[str, float]:
    return {name: lr for names, lr, _ in named(groups, model) for name in names}


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn"])
def test_weights_of_layers_decay_and_nothing_else(name, variant):
    model = detector(name, "MODEL.TRANSFORMER.NAME", variant)
    layers = nn.Linear, nn.Conv2d, nn.ConvTranspose2d
    weights = {f"{prefix}.weight" for prefix, module in model.named_modules() if isinstance(module, layers)}
    everything = {parameter_name for parameter_name, _ in model.named_parameters()}
    assert undecayed_parameters(model) == everything - weights

    groups = named(parameter_groups(model, base_lr=0.1, weight_decay=0.2), model)
    assert {decay: set(names) for names, _, decay in groups} == {0.2: weights, 0.0: everything - weights}
    assert max(Counter(n for names, _, _ in groups for n in names).values()) == 1


@pytest.mark.parametrize(
    "variant, ending, count",
    [
        (VARIANTS[0], "relative_bias.table", 6),
        (VARIANTS[0], "local_to_global", 5),
        (VARIANTS[0], "global_tokens", 3),
        (VARIANTS[1], "positions.rows", 4),
        (VARIANTS[1], "positions.cols", 4),
        (VARIANTS[1], "global_tokens", 6),
        (VARIANTS[1], "norm.weight", 16 + 6),
    ],
)
def test_the_backbones_own_list_reaches_the_detector(variant, ending, count):
    undecayed = undecayed_parameters(detector("retinanet", "MODEL.TRANSFORMER.NAME", variant))
    assert sum(name.endswith(ending) for name in undecayed) == count


def test_frozen_parameters_are_left_out():
    model = detector("retinanet", "MODEL.BACKBONE.FREEZE_AT", "2")
    groups = parameter_groups(model, base_lr=0.1, weight_decay=0.2)
    names = {name for group_names, _, _ in named(groups, model) for name in group_names}
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("stages.0." in name or "stages.1." in name for name in names)


def test_factors_of_all_patterns_that_match_are_multiplied():
    model = detector()
    multipliers = [["backbone.bottom_up.*", 0.5], ["*.stages.0.*", 0.1]]
    groups = parameter_groups(model, base_lr=0.2, weight_decay=0.3, lr_multipliers=multipliers)
    rates = learning_rates(groups, model)
    assert rates.keys() == dict(model.named_parameters()).keys()
    for name, lr in rates.items():
        inside = name.startswith("backbone.bottom_up."), ".stages.0." in name
        assert lr == pytest.approx(0.2 * (0.5 if inside[0] else 1) * (0.1 if inside[1] else 1)), name
    assert {decay for _, _, decay in named(groups, model)} == {0.0, 0.3}


def test_pattern_without_a_match_names_the_closest():
    with pytest.raises(InputError, match="'0.weigth' in optimizer.params.lr_multipliers matches no .*'0.weight'"):
        parameter_groups(two_layers(), base_lr=1, weight_decay=0, lr_multipliers=[["0.weigth", 2]])


@pytest.mark.parametrize("entry", ["0.weight", ["0.weight"], ["0.weight", "2"], ["0.weight", 2, 3], 5, [5, 2.0]])
def test_entry_that_is_no_pair(entry):
    with pytest.raises(InputError, match="optimizer.params.lr_multipliers has .*: it is a list of pairs"):
        parameter_groups(two_layers(), base_lr=1, weight_decay=0, lr_multipliers=[entry])


def test_multipliers_from_the_command_line():
    cfg = small_config("retinanet", "SOLVER.LR_MULTIPLIERS", "[['*.table', 0.1]]", "SOLVER.BASE_LR", "0.5")
    model = build_model(cfg)
    rates = learning_rates(build_optimizer(cfg, model).param_groups, model)
    assert {round(lr, 9) for name, lr in rates.items() if name.endswith(".table")} == {0.05}
    assert {lr for name, lr in rates.items() if not name.endswith(".table")} == {0.5}


@pytest.mark.parametrize("name, kind", [("ADAMW", torch.optim.AdamW), ("SGD", torch.optim.SGD)])
def test_optimizers(name, kind):
    overrides = ["SOLVER.OPTIMIZER", name, "SOLVER.MOMENTUM", "0.7", "SOLVER.NESTEROV", "True"]
    optimizer = build_optimizer(small_config("retinanet", *overrides), two_layers())
    assert isinstance(optimizer, kind)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    if name == "SGD":
        assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.7, True)}


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("SOLVER.OPTIMIZER", "ADAM", "SOLVER.OPTIMIZER is 'ADAM': it is ADAMW or SGD"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full", "CLIP_TYPE is 'full': it is full_model, norm or value"),
    ],
)
def test_unknown_optimizer_and_clip_type(key, value, message):
    with pytest.raises(InputError, match=message):
        build_optimizer(small_config("retinanet", key, value), two_layers())


# -- clipping: an update of SGD at a rate of 1 is the gradient -------------------------------------


def clipping(**changes):
    """SGD without momentum at a rate of 1, with these keys of SOLVER.CLIP_GRADIENTS."""
    overrides = ["SOLVER.OPTIMIZER", "SGD", "SOLVER.MOMENTUM", "0.0", "SOLVER.WEIGHT_DECAY", "0.0"]
    overrides += ["SOLVER.BASE_LR", "1.0"]
    for key, value in changes.items():
        overrides += [f"SOLVER.CLIP_GRADIENTS.{key}", str(value)]
    return small_config("retinanet", *overrides)


def with_gradients(scale: float) -> nn.Sequential:
    model = two_layers()
    for index, parameter in enumerate(model.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.grad = scale * (index + 1) * values
    return model


def update(cfg, model: nn.Module) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in model.parameters()]
    build_optimizer(cfg, model).step()
    return [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]


def total_norm(tensors: list[torch.Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()


@pytest.mark.parametrize("scale", [100.0, 1e-3])
def test_full_model_clipping_bounds_the_norm_of_all_gradients_together(scale):
    model = with_gradients(scale)
    gradients = [p.grad.clone() for p in model.parameters()]
    norm = total_norm(gradients)
    expected = [gradient * min(1.0, 0.5 / norm) for gradient in gradients]
    updates = update(clipping(CLIP_VALUE=0.5), model)
    torch.testing.assert_close(updates, expected, rtol=1e-4, atol=1e-6)
    assert total_norm(updates) == pytest.approx(min(norm, 0.5), rel=1e-3)


def test_full_model_clipping_with_adamw_equals_gradients_clipped_by_hand():
    cfg = small_config("retinanet", "SOLVER.BASE_LR", "0.1")
    ours, by_hand = two_layers(), two_layers()
    groups = parameter_groups(by_hand, base_lr=0.1, weight_decay=cfg.SOLVER.WEIGHT_DECAY)
    optimizers = build_optimizer(cfg, ours), torch.optim.AdamW(groups, lr=0.1)
    # Of very different norms: clipped or not, Adam's second step differs.
    for scale in (1e-3, 100.0):
        for model, optimizer in zip((ours, by_hand), optimizers, strict=True):
            for p, source in zip(model.parameters(), with_gradients(scale).parameters(), strict=True):
                p.grad = source.grad
            if model is by_hand:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.testing.assert_close(list(ours.parameters()), list(by_hand.parameters()))


def test_norm_type_arrives():
    updates = update(clipping(CLIP_VALUE=0.5, NORM_TYPE=1.0), with_gradients(100.0))
    assert sum(tensor.abs().sum().item() for tensor in updates) == pytest.approx(0.5, rel=1e-3)


def test_norm_clipping_bounds_each_parameter():
    model = with_gradients(100.0)
    updates = update(clipping(CLIP_TYPE="norm", CLIP_VALUE=0.5), model)
    assert [tensor.norm().item() for tensor in updates] == pytest.approx([0.5] * len(updates), rel=1e-3)


def test_value_clipping_bounds_each_entry():
    model = with_gradients(1.0)
    expected = [p.grad.clamp(-0.5, 0.5) for p in model.parameters()]
    updates = update(clipping(CLIP_TYPE="value", CLIP_VALUE=0.5), model)
    torch.testing.assert_close(updates, expected, rtol=1e-4, atol=1e-6)


def test_clipping_can_be_off():
    model = with_gradients(100.0)
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(update(clipping(ENABLED=False), model), gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_raises_and_leaves_the_weights(bad):
    model = with_gradients(1.0)
    model[0].weight.grad[0, 0] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="non-finite"):
        build_optimizer(small_config(), model).step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_clipping_comes_after_the_scalers_scale_is_off():
    model = with_gradients(1e-3)
    gradients = [p.grad.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(clipping(CLIP_VALUE=0.5), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for p in model.parameters():
        p.grad *= scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    updates = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(updates, gradients, rtol=1e-3, atol=1e-6)


def test_the_scaler_skips_an_infinite_gradient_without_an_error():
    model = with_gradients(1.0)
    model[0].weight.grad[0, 0] = float("inf")
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(build_optimizer(small_config(), model))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# -- detectron2's keys -----------------------------------------------------------------------------


def decays_and_rates(*overrides: str) -> dict[str, tuple[float, float]]:
    """Weight decay and learning rate by name; a bare parameter stands for tables and tokens."""
    model = two_layers()
    model.register_parameter("table", nn.Parameter(torch.zeros(3)))
    keys = ["SOLVER.WEIGHT_DECAY", "0.3", "SOLVER.BASE_LR", "0.5", *overrides]
    groups = build_optimizer(small_config("retinanet", *keys), model).param_groups
    return {name: (decay, lr) for names, lr, decay in named(groups, model) for name in names}


@pytest.mark.parametrize(
    "overrides, weight, bias, norm_weight, norm_bias",
    [
        ([], (0.3, 0.5), (0, 0.5), (0, 0.5), (0, 0.5)),
        (["WEIGHT_DECAY_NORM", "0.2"], (0.3, 0.5), (0, 0.5), (0.2, 0.5), (0, 0.5)),
        (["WEIGHT_DECAY_BIAS", "0.1"], (0.3, 0.5), (0.1, 0.5), (0, 0.5), (0.1, 0.5)),
        (["WEIGHT_DECAY_BIAS", "None"], (0.3, 0.5), (0.3, 0.5), (0, 0.5), (0, 0.5)),
        (["WEIGHT_DECAY_BIAS", "None", "WEIGHT_DECAY_NORM", "None"], *[(0.3, 0.5)] * 4),
        (["BIAS_LR_FACTOR", "2.0"], (0.3, 0.5), (0, 1.0), (0, 0.5), (0, 1.0)),
    ],
)
def test_keys_of_detectron2(overrides, weight, bias, norm_weight, norm_bias):
    keys = [token if index % 2 else f"SOLVER.{token}" for index, token in enumerate(overrides)]
    found = decays_and_rates(*keys)
    assert found == {
        **{"0.weight": weight, "2.weight": weight, "0.bias": bias, "2.bias": bias},
        **{"1.weight": norm_weight, "1.bias": norm_bias, "table": (0, 0.5)},
    }
    # Where detectron2 has the same parameters, it groups them alike.
    cfg = small_config("retinanet", "SOLVER.WEIGHT_DECAY", "0.3", "SOLVER.BASE_LR", "0.5", *keys)
    model = two_layers()
    theirs = get_default_optimizer_params(
        model,
        base_lr=0.5,
        weight_decay=0.3,
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM,
        bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS,
    )
    assert {name: (decay, lr) for names, lr, decay in named(theirs, model) for name in names} == {
        name: value for name, value in found.items() if name != "table"
    }


def shipped_configs() -> list[Path]:
    folders = [ROOT / "configs" / name for name in ("retinanet", "mask_rcnn", "semantic_fpn")]
    return [path for folder in folders for path in sorted(folder.iterdir())]


def test_the_optimizers_of_shipped_configs():
    """One decay for weights of layers, none for the rest, and the rates of LR_MULTIPLIERS alone: one of each family."""
    names = ("vil_tiny_1x", "ls_small_1x", "cvt_ls_13_1x", "lit_ti_1x", "lit_ti")
    paths = [path for path in shipped_configs() if path.stem in names]
    assert len(paths) == 9
    for path in paths:
        cfg = load_config(path)
        model = build_on_meta(cfg)
        undecayed = undecayed_parameters(model)
        for names, lr, decay in named(build_optimizer(cfg, model).param_groups, model):
            assert {decay} == {0.0 if name in undecayed else cfg.SOLVER.WEIGHT_DECAY for name in names}, path
            if not cfg.SOLVER.LR_MULTIPLIERS:
                assert lr == cfg.SOLVER.BASE_LR
