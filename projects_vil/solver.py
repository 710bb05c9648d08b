"""Optimizers, parameter groups and learning-rate schedules."""

import fnmatch
import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver import LRMultiplier, WarmupParamScheduler
from detectron2.solver import build_lr_scheduler as build_detectron2_lr_scheduler
from detectron2.solver.build import maybe_add_gradient_clipping
from torch import nn

from backbones import ConfigError
from backbones.errors import check_choice, closest, one_line
from projects_vil.config import with_overrides

OPTIMIZERS = ("ADAMW", "SGD")
LR_SCHEDULERS = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR", "WarmupPolyLR")
# Modules with SOLVER.WEIGHT_DECAY_NORM. detectron2 has the same list, local to a function. Batch and instance norms are
# subclasses of _NormBase.
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm)
# With SOLVER.EPOCHS, the warm-up is limited to this share of the run. The limit is at least 20 iterations, or half of a
# shorter run, because AdamW's first steps at the full rate would damage pretrained weights. An epoch of 1000 or more
# iterations ends with an evaluation. Shorter epochs are evaluated at most every 200 iterations and 20 times.
_WARMUP_SHARE, _SHORT_WARMUP = 0.05, 20
_LONG_EPOCH = 1000
_MIN_PERIOD = 200
_MAX_EVALUATIONS = 20
# The keys of SOLVER that are keywords of parameter_groups.
_GROUP_KEYS = ("BASE_LR", "WEIGHT_DECAY", "WEIGHT_DECAY_NORM", "WEIGHT_DECAY_BIAS", "BIAS_LR_FACTOR")
_GROUP_KEYS += ("LR_MULTIPLIERS", "LAYER_DECAY")
# The key in YAML configs, and in LazyConfigs.
_LAYER_DECAY = "SOLVER.LAYER_DECAY (optimizer.params.layer_decay)"
_LR_MULTIPLIERS = "SOLVER.LR_MULTIPLIERS (optimizer.params.lr_multipliers)"


# -- parameter groups ------------------------------------------------------------------------------


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
) -> list[dict[str, Any]]:
    """Return the trainable parameters, grouped by learning rate and weight decay.

    The rules are the same as in detectron2's ``get_default_optimizer_params``. In addition, parameters with at most one
    dimension, and those that a module names in ``no_weight_decay()``, have no weight decay. Groups and parameters are
    in the order of the model.

    Args:
        model: A detector, or any module.
        base_lr: Learning rate before all factors.
        weight_decay: Weight decay of all other parameters.
        weight_decay_norm: Weight decay of norms; None for ``weight_decay``. It applies to their biases if
            ``weight_decay_bias`` is None.
        weight_decay_bias: Weight decay of biases; None for ``weight_decay``.
        bias_lr_factor: Factor of the learning rate of biases.
        lr_multipliers: Pairs of a shell-style pattern of parameter names and a factor. If several patterns match, the
            factors are multiplied.
        layer_decay: See :func:`layer_decay_factors`.

    Raises:
        ConfigError: If a pattern matches no trainable parameter, or the layer decay is invalid.
    """
    for entry in lr_multipliers:
        match entry:
            case [str(pattern), int() | float() as factor] if 0 <= factor < math.inf:
                pass
            case _:
                raise ConfigError(f"{_LR_MULTIPLIERS} has {entry!r}. Use pairs, such as [['*.stages.0.*', 0.1]].")
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not fnmatch.filter(names, pattern):
            text = f"The pattern {pattern!r} in {_LR_MULTIPLIERS} matches no trainable parameter"
            raise ConfigError(f"{text}{closest(pattern, names) or '.'} Correct it, or set [] for no patterns.")
    layer_factors = {} if layer_decay == 1 else layer_decay_factors(model, layer_decay)
    no_decay: set[nn.Parameter] = set()
    for module in model.modules():
        if hasattr(module, "no_weight_decay"):
            names = module.no_weight_decay()
            no_decay |= {parameter for name, parameter in module.named_parameters() if name in names}
    # In the order of the model, because checkpoints number the parameters of an optimizer.
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        prefix, _, leaf = name.rpartition(".")
        module, is_bias = model.get_submodule(prefix), leaf == "bias"
        factor = layer_factors.get(name, 1.0) * (bias_lr_factor if is_bias else 1.0)
        for pattern, pattern_factor in lr_multipliers:
            if fnmatch.fnmatchcase(name, pattern):
                factor *= pattern_factor
        if is_bias and weight_decay_bias is not None:
            decay = weight_decay_bias
        elif isinstance(module, _NORMS):
            decay = weight_decay if weight_decay_norm is None else weight_decay_norm
        elif not is_bias and (parameter.ndim <= 1 or parameter in no_decay):
            decay = 0.0
        else:
            decay = weight_decay
        group = {"lr": base_lr * factor, "weight_decay": decay, "params": []}
        groups.setdefault((base_lr * factor, decay), group)["params"].append(parameter)
    return list(groups.values())


def layer_decay_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning-rate factor of each backbone parameter, by its full name.

    The factor is ``decay ** (num_layers + 1 - layer_id)``, as in detectron2's ``get_vit_lr_decay_rate``: ``decay`` for
    the last block, ``decay ** (num_layers + 1)`` for the patch embedding. FPN and heads have no factor.

    Args:
        model: A model with a :class:`backbones.backbone.Backbone`.
        decay: A number above 0 and at most 1; 1 means no decay.

    Raises:
        ConfigError: If the decay is out of range, or below 1 for a model without numbered layers.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"{_LAYER_DECAY} is {decay!r}. It must be above 0 and at most 1.0 (no decay).")
    factors = {
        f"{prefix}.{name}".lstrip("."): decay ** (module.num_layers + 1 - module.layer_id(name))
        for prefix, module in model.named_modules()
        if hasattr(module, "layer_id")
        for name, _ in module.named_parameters()
    }
    if not factors:
        raise ConfigError(f"{_LAYER_DECAY} is {decay}, but this backbone does not number its layers. Set it to 1.0.")
    return factors


# -- optimizer and schedule ------------------------------------------------------------------------


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW or SGD with :func:`parameter_groups` and the clipping of ``SOLVER.CLIP_GRADIENTS``.

    ``CLIP_TYPE: full_model`` is :func:`clip_full_model`; ``value`` and ``norm`` are detectron2's. If the norm of all
    gradients is not finite, ``step()`` raises FloatingPointError before any weight changes.

    Raises:
        ConfigError: For an unknown ``SOLVER.OPTIMIZER``, and see :func:`parameter_groups`.
    """
    solver, clip = cfg.SOLVER, cfg.SOLVER.CLIP_GRADIENTS
    check_choice("SOLVER.OPTIMIZER", solver.OPTIMIZER, OPTIMIZERS)
    groups = parameter_groups(model, **{key.lower(): solver[key] for key in _GROUP_KEYS})
    options = {"lr": solver.BASE_LR, "fused": True}
    if solver.OPTIMIZER == "ADAMW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **options)
    else:
        optimizer = torch.optim.SGD(groups, momentum=solver.MOMENTUM, nesterov=solver.NESTEROV, **options)
    is_full_model = clip.ENABLED and clip.CLIP_TYPE == "full_model"
    if not is_full_model:
        optimizer = maybe_add_gradient_clipping(cfg, optimizer)
    clip_full_model(optimizer, clip.CLIP_VALUE if is_full_model else math.inf, norm_type=clip.NORM_TYPE)
    return optimizer


def clip_full_model(optimizer: torch.optim.Optimizer, max_norm: float, *, norm_type: float = 2.0) -> None:
    """Before each step of ``optimizer``, scale all gradients together to a norm of at most ``max_norm``.

    The norm before clipping is stored as ``optimizer.gradient_norm``, a tensor. If it is not finite,
    ``optimizer.step()`` raises FloatingPointError before any weight changes. If the attribute ``found_inf`` of a fused
    optimizer is set, the hook raises nothing and sets the flag to 1: the step then has no effect.
    """

    def clip(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm_type=norm_type)
        optimizer.gradient_norm = norm
        if hasattr(optimizer, "found_inf"):
            optimizer.found_inf = torch.maximum(optimizer.found_inf, (~norm.isfinite()).float())
            # torch leaves the momentum undefined if the first step has no effect.
            for group in optimizer.param_groups:
                for parameter in group["params"] if group.get("momentum") else ():
                    if "momentum_buffer" not in optimizer.state[parameter]:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        elif not norm.isfinite():
            raise FloatingPointError(f"the norm of the gradients is {norm}")
        if max_norm < math.inf:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    optimizer.register_step_pre_hook(clip)


def build_lr_scheduler(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Build one of detectron2's schedules, or ``WarmupPolyLR``.

    After detectron2's warm-up, ``WarmupPolyLR`` is ``BASE_LR_END + (BASE_LR - BASE_LR_END) (1 - t) ** POLY_LR_POWER``,
    where t grows from 0 in the first iteration to 1 after the last. fvcore's polynomial decay always ends at 0.

    Raises:
        ConfigError: If the last learning rate is larger than the first, or the steps are outside of the run.
    """
    solver = cfg.SOLVER
    if not 0 <= solver.BASE_LR_END <= solver.BASE_LR:
        raise ConfigError(f"SOLVER.BASE_LR_END is {solver.BASE_LR_END}. Use 0 to SOLVER.BASE_LR, {solver.BASE_LR}.")
    if solver.LR_SCHEDULER_NAME != "WarmupPolyLR":
        try:
            return build_detectron2_lr_scheduler(cfg, optimizer)
        except (ValueError, AssertionError) as error:
            advice = "Check SOLVER.STEPS, MAX_ITER and WARMUP_ITERS."
            raise ConfigError(f"Invalid schedule ({one_line(error)}). {advice}") from error
    end = solver.BASE_LR_END / solver.BASE_LR
    schedule = WarmupParamScheduler(
        lambda where: end + (1 - end) * max(1 - where, 0.0) ** solver.POLY_LR_POWER,
        solver.WARMUP_FACTOR,
        min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0),
        solver.WARMUP_METHOD,
        solver.RESCALE_INTERVAL,
    )
    return LRMultiplier(optimizer, multiplier=schedule, max_iter=solver.MAX_ITER)


def main_group(optimizer: torch.optim.Optimizer) -> int:
    """Return the index of the parameter group whose learning rate is logged.

    This is the first group with the optimizer's own learning rate, ``SOLVER.BASE_LR``; 0 if there is none.
    """
    rates, own = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups], optimizer.defaults["lr"]
    return rates.index(own) if own in rates else 0


# -- schedules that depend on the data and the batch -----------------------------------------------


def longest_warmup(iterations: int) -> int:
    """Return the longest warm-up: 5 % of the iterations, but at least 20 or half of them, whichever is smaller."""
    return max(math.ceil(_WARMUP_SHARE * iterations), min(_SHORT_WARMUP, iterations // 2))


def resolve_schedule(cfg: CfgNode, num_images: int, overridden: Collection[str] = ()) -> tuple[CfgNode, list[str]]:
    """Replace ``SOLVER.EPOCHS`` by iterations, and scale the learning rate from ``SOLVER.REFERENCE_BATCH_SIZE``.

    An epoch has ``num_images / SOLVER.IMS_PER_BATCH`` iterations. Fractions are rounded up.

    - ``SOLVER.MAX_ITER`` is set to the length of all epochs.
    - ``SOLVER.STEPS`` keep their fractions of ``MAX_ITER``. Schedules without steps keep their shape anyway.
    - ``SOLVER.WARMUP_ITERS`` is limited to :func:`longest_warmup`.
    - ``TEST.EVAL_PERIOD`` and ``SOLVER.CHECKPOINT_PERIOD`` are one epoch if it has at least 1000 iterations. Otherwise
      they are the smallest number of epochs with at least 200 iterations and at least 1/20 of all epochs.

    A key in ``overridden`` keeps its value. ``SOLVER.MAX_ITER`` in it takes precedence over epochs of the config file.
    ``SOLVER.BASE_LR`` and ``BASE_LR_END`` are multiplied by ``IMS_PER_BATCH / REFERENCE_BATCH_SIZE``.

    Args:
        cfg: The config.
        num_images: Images per epoch, without the images that ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` removes.
        overridden: Config keys that the user set for this run.

    Returns:
        A config in which ``SOLVER.EPOCHS`` and ``REFERENCE_BATCH_SIZE`` are 0, so that a resumed run has the same
        schedule, and lines for the log.

    Raises:
        ConfigError: For a negative number of epochs.
    """
    solver, values, lines = cfg.SOLVER, {}, []
    epochs, batch, reference = solver.EPOCHS, solver.IMS_PER_BATCH, solver.REFERENCE_BATCH_SIZE
    if epochs < 0:
        raise ConfigError(f"SOLVER.EPOCHS is {epochs}. It must be at least 1, or 0 to use SOLVER.MAX_ITER.")
    if epochs and "SOLVER.MAX_ITER" in overridden:
        lines.append(f"SOLVER.MAX_ITER {solver.MAX_ITER} overrides SOLVER.EPOCHS {epochs} of the config")
    elif epochs:
        epoch = num_images / batch
        iterations = math.ceil(epochs * epoch)
        short = max(math.ceil(_MIN_PERIOD / epoch), math.ceil(epochs / _MAX_EVALUATIONS))
        period = min(math.ceil(epoch * (1 if epoch >= _LONG_EPOCH else short)), iterations)
        values = {
            "SOLVER.MAX_ITER": iterations,
            "SOLVER.WARMUP_ITERS": min(solver.WARMUP_ITERS, longest_warmup(iterations)),
            "TEST.EVAL_PERIOD": period,
            "SOLVER.CHECKPOINT_PERIOD": period,
        }
        if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
            scaled = (round(step / solver.MAX_ITER * iterations) for step in solver.STEPS if step < solver.MAX_ITER)
            # In a run of a few iterations, steps may coincide or reach its end.
            values["SOLVER.STEPS"] = tuple(sorted({step for step in scaled if 0 < step < iterations}))
        for key in overridden:
            values.pop(key, None)
        length = f"{num_images} training images, {batch} per iteration, {epoch:.4g} iterations per epoch"
        words = " ".join(f"{key} {shlex.quote(str(value))}" for key, value in values.items())
        lines += [f"SOLVER.EPOCHS {epochs}: {length}", f"SOLVER.EPOCHS {epochs} sets {words}"]
    if reference:
        rates = {f"SOLVER.{key}": solver[key] * batch / reference for key in ("BASE_LR", "BASE_LR_END")}
        values |= rates
        rate = f"{rates['SOLVER.BASE_LR']:g} for {batch}"
        lines.append(f"SOLVER.BASE_LR {solver.BASE_LR:g} for {reference} images becomes {rate}")
    return with_overrides(cfg, values | {"SOLVER.EPOCHS": 0, "SOLVER.REFERENCE_BATCH_SIZE": 0}), lines
