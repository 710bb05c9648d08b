"""Parameter groups, learning-rate multipliers and clipping: AdamW as the papers train their detectors."""

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import maybe_add_gradient_clipping
from torch import nn

from backbones import InputError
from backbones.errors import closest
from projects_vil.solver.clipping import clip_full_model


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of parameters that take no weight decay: biases and norms, and what a backbone's own list names."""
    names = {name for name, parameter in model.named_parameters() if parameter.ndim <= 1}
    for prefix, module in model.named_modules():
        own_list = getattr(module, "no_weight_decay", None)
        if callable(own_list):
            names |= {f"{prefix}.{name}" if prefix else name for name in own_list()}
    return names


def parameter_groups(
    model: nn.Module, *, base_lr: float, weight_decay: float, lr_multipliers: Iterable[Sequence] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters, grouped by learning rate and weight decay.

    Args:
        model: whose modules may have ``no_weight_decay()``, a set of their parameters' names.
        base_lr: learning rate where no pattern matches.
        weight_decay: of the parameters that :func:`undecayed_parameters` does not name.
        lr_multipliers: pairs of a shell-style pattern on full parameter names and a factor; the factors of all
            patterns that match are multiplied.

    Raises:
        InputError: for a pair that is none, or a pattern that matches no trained parameter.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    multipliers = [_check_multiplier(pair, names) for pair in lr_multipliers]
    undecayed = undecayed_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = base_lr
        for pattern, factor in multipliers:
            if fnmatch.fnmatchcase(name, pattern):
                lr *= factor
        groups[lr, 0.0 if name in undecayed else weight_decay].append(parameter)
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD on :func:`parameter_groups`, with the clipping of ``SOLVER.CLIP_GRADIENTS``.

    ``CLIP_TYPE: full_model`` is :func:`~projects_vil.solver.clipping.clip_full_model`; ``value`` and ``norm`` are
    detectron2's.

    Raises:
        InputError: for an unknown ``SOLVER.OPTIMIZER``, clip type or multiplier pattern.
    """
    groups = parameter_groups(
        model,
        base_lr=cfg.SOLVER.BASE_LR,
        weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        lr_multipliers=cfg.SOLVER.LR_MULTIPLIERS,
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


def _check_multiplier(pair: Sequence, names: list[str]) -> tuple[str, float]:
    # A LazyConfig's lists are Sequences of their own.
    is_pair = isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str)
    if not is_pair or isinstance(pair[1], bool) or not isinstance(pair[1], (int, float)):
        raise InputError(f"SOLVER.LR_MULTIPLIERS has {pair!r}: it is a list of pairs [pattern, factor]")
    pattern, factor = pair
    if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
        raise InputError(
            f"the pattern {pattern!r} in SOLVER.LR_MULTIPLIERS matches no trained parameter{closest(pattern, names)}; "
            "SOLVER.LR_MULTIPLIERS [] has none"
        )
    return pattern, float(factor)
