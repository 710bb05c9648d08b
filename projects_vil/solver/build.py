"""Parameter groups, learning-rate multipliers and clipping: AdamW as the papers train their detectors."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import maybe_add_gradient_clipping
from torch import nn

from backbones import InputError
from backbones.utils.errors import closest
from projects_vil.solver.clipping import clip_full_model
from projects_vil.solver.layer_decay import layer_factors

OPTIMIZERS = ("ADAMW", "SGD")
# detectron2's list, which is inside a function there.
_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of parameters that take no weight decay: biases and norms, and what a backbone's own list names."""
    names = {name for name, parameter in model.named_parameters() if parameter.ndim <= 1}
    for prefix, module in model.named_modules():
        own_list = getattr(module, "no_weight_decay", None)
        if callable(own_list):
            names |= {f"{prefix}.{name}" if prefix else name for name in own_list()}
    return names


def parameter_groups(
    model: nn.Module,
    *,
    base_lr: float,
    weight_decay: float,
    weight_decay_norm: float | None = 0.0,
    weight_decay_bias: float | None = 0.0,
    bias_lr_factor: float = 1.0,
    lr_multipliers: Iterable[Sequence] = (),
    layer_decay: float = 1.0,
    key_of: Callable[[str], str] = "optimizer.params.{}".format,
) -> list[dict[str, Any]]:
    """Trainable parameters, grouped by learning rate and weight decay.

    Args:
        model: whose modules may have ``no_weight_decay()``, a set of their parameters' names.
        base_lr: learning rate where no pattern matches.
        weight_decay: of the parameters that :func:`undecayed_parameters` does not name.
        weight_decay_norm: of the weights of norms, and of their biases where ``weight_decay_bias`` is None; None for
            ``weight_decay``.
        weight_decay_bias: of biases; None for ``weight_decay``.
        bias_lr_factor: what the learning rate of biases is multiplied by.
        lr_multipliers: pairs of a shell-style pattern on full parameter names and a factor; the factors of all
            patterns that match are multiplied.
        layer_decay: as :func:`~projects_vil.solver.layer_decay.layer_factors`, whose factors are multiplied with these.
        key_of: what a config calls one of these arguments; by default a LazyConfig.

    Raises:
        InputError: for a pair that is none, a pattern that matches no trained parameter, or a decay that cannot be.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    multipliers = [_check_multiplier(pair, names, key=key_of("lr_multipliers")) for pair in lr_multipliers]
    of_layers = layer_factors(model, layer_decay, key=key_of("layer_decay"))
    decays = {name: 0.0 for name in undecayed_parameters(model)}
    biases = set()
    for prefix, module in model.named_modules():
        for own_name, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            is_norm = isinstance(module, _NORMS)
            if own_name == "bias":
                biases.add(name)
            if own_name == "bias" and not (is_norm and weight_decay_bias is None):
                decays[name] = weight_decay if weight_decay_bias is None else weight_decay_bias
            elif is_norm:
                decays[name] = weight_decay if weight_decay_norm is None else weight_decay_norm
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = base_lr * of_layers.get(name, 1.0) * (bias_lr_factor if name in biases else 1.0)
        for pattern, factor in multipliers:
            if fnmatch.fnmatchcase(name, pattern):
                lr *= factor
        groups[lr, decays.get(name, weight_decay)].append(parameter)
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD on :func:`parameter_groups`, with the clipping of ``SOLVER.CLIP_GRADIENTS``.

    ``CLIP_TYPE: full_model`` is :func:`~projects_vil.solver.clipping.clip_full_model`; ``value`` and ``norm`` are
    detectron2's.

    Raises:
        InputError: for an unknown ``SOLVER.OPTIMIZER`` or clip type, or as :func:`parameter_groups`.
    """
    groups = parameter_groups(
        model,
        base_lr=cfg.SOLVER.BASE_LR,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        weight_decay_norm=cfg.SOLVER.WEIGHT_DECAY_NORM,
        weight_decay_bias=cfg.SOLVER.WEIGHT_DECAY_BIAS,
        bias_lr_factor=cfg.SOLVER.BIAS_LR_FACTOR,
        lr_multipliers=cfg.SOLVER.LR_MULTIPLIERS,
        layer_decay=cfg.SOLVER.LAYER_DECAY,
        key_of=lambda name: f"SOLVER.{name.upper()}",
    )
    if cfg.SOLVER.OPTIMIZER == "ADAMW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=cfg.SOLVER.BASE_LR)
    elif cfg.SOLVER.OPTIMIZER == "SGD":
        optimizer = torch.optim.SGD(
            groups, lr=cfg.SOLVER.BASE_LR, momentum=cfg.SOLVER.MOMENTUM, nesterov=cfg.SOLVER.NESTEROV
        )
    else:
        raise InputError(f"SOLVER.OPTIMIZER is {cfg.SOLVER.OPTIMIZER!r}: it is ADAMW or SGD")

    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return optimizer
    if clip.CLIP_TYPE in ("value", "norm"):
        return maybe_add_gradient_clipping(cfg, optimizer)
    if clip.CLIP_TYPE != "full_model":
        raise InputError(f"SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clip.CLIP_TYPE!r}: it is full_model, norm or value")
    clip_full_model(optimizer, clip.CLIP_VALUE, norm_type=clip.NORM_TYPE)
    return optimizer


def _check_multiplier(pair: Sequence, names: list[str], *, key: str) -> tuple[str, float]:
    # A LazyConfig's lists are Sequences of their own.
    is_pair = isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str)
    if not is_pair or isinstance(pair[1], bool) or not isinstance(pair[1], (int, float)):
        raise InputError(f"{key} has {pair!r}: it is a list of pairs [pattern, factor]")
    pattern, factor = pair
    if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
        hint = f"{closest(pattern, names)}; [] has no patterns"
        raise InputError(f"the pattern {pattern!r} in {key} matches no trained parameter{hint}")
    return pattern, float(factor)
