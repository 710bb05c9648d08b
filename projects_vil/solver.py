"""Optimizers, their parameter groups and learning-rate schedules, as the papers train their detectors."""

import fnmatch
import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.solver import LRMultiplier, WarmupParamScheduler
from detectron2.solver import build_lr_scheduler as build_detectron2_lr_scheduler
from detectron2.solver.build import (
    get_default_optimizer_params,
    maybe_add_gradient_clipping,
    reduce_param_groups,
)
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import nn

from backbones import ConfigError
from backbones.errors import check_choice, closest
from projects_vil.config import one_line, with_overrides

OPTIMIZERS = ("ADAMW", "SGD")
LR_SCHEDULERS = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR", "WarmupPolyLR")
# Their parameters have SOLVER.WEIGHT_DECAY_NORM: detectron2's list, which is local to a function there.
_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)
# SOLVER.EPOCHS: the warm-up is at most this share of the run; an evaluation takes place every epoch of 1000 or more
# iterations, else every 100 iterations and at most 20 times.
_WARMUP_SHARE = 0.05
_LONG_EPOCH = 1000
_MIN_PERIOD = 100
_MAX_EVALUATIONS = 20
# The keys of YAML configs and LazyConfigs.
_LAYER_DECAY = "SOLVER.LAYER_DECAY (optimizer.params.layer_decay)"


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

    The groups are those of detectron2's ``get_default_optimizer_params``, but parameters with at most one dimension,
    and those that a module's own ``no_weight_decay()`` names, take no weight decay.

    Args:
        model: a detector, or any module.
        base_lr: learning rate where no pattern matches.
        weight_decay: decay of all other parameters.
        weight_decay_norm: decay of the weights of norms, and of their biases where ``weight_decay_bias`` is None; None
            for ``weight_decay``.
        weight_decay_bias: decay of biases; None for ``weight_decay``.
        bias_lr_factor: factor of the learning rate of biases.
        lr_multipliers: pairs of a shell-style pattern on full parameter names and a factor; the factors of all
            matching patterns are multiplied.
        layer_decay: see :func:`layer_decay_factors`.

    Raises:
        ConfigError: for a pattern that matches no trainable parameter, or an invalid decay.
    """
    order = {parameter: index for index, parameter in enumerate(model.parameters())}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for entry in lr_multipliers:
        match entry:
            case [str(pattern), int() | float() as factor] if 0 <= factor < math.inf:
                pass
            case _:
                raise ConfigError(
                    f"SOLVER.LR_MULTIPLIERS (optimizer.params.lr_multipliers) has {entry!r}: it must be a list of "
                    "pairs of a pattern and a number, [['*.stages.0.*', 0.1]]"
                )
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"the pattern {pattern!r} in SOLVER.LR_MULTIPLIERS (optimizer.params.lr_multipliers) matches no "
                f"trainable parameter ([] has no patterns){closest(pattern, names)}"
            )
    layer_factors = layer_decay_factors(model, layer_decay)

    def lr_factor(name: str) -> float:
        name = name.lstrip(".")
        factors = [factor for pattern, factor in lr_multipliers if fnmatch.fnmatchcase(name, pattern)]
        is_bias = name.rpartition(".")[2] == "bias"
        return math.prod(factors, start=layer_factors.get(name, 1.0) * (bias_lr_factor if is_bias else 1.0))

    groups = get_default_optimizer_params(
        model,
        base_lr=base_lr,
        weight_decay=weight_decay,
        weight_decay_norm=weight_decay_norm,
        weight_decay_bias=weight_decay_bias,
        lr_factor_func=lr_factor,
    )
    excluded = _without_weight_decay(model)
    single = [
        group | {"params": [parameter]} | ({"weight_decay": 0.0} if parameter in excluded else {})
        for group in groups
        for parameter in group["params"]
    ]
    # Checkpoints number the parameters of an optimizer in the model's order.
    return reduce_param_groups(sorted(single, key=lambda group: order[group["params"][0]]))


def _without_weight_decay(model: nn.Module) -> set[nn.Parameter]:
    """Parameters other than biases and norms, which have keys of their own in detectron2, that do not decay."""
    listed = set()
    for module in model.modules():
        if hasattr(module, "no_weight_decay"):
            own = module.no_weight_decay()
            listed |= {parameter for name, parameter in module.named_parameters() if name in own}
    return {
        parameter
        for module in model.modules()
        if not isinstance(module, _NORMS)
        for name, parameter in module.named_parameters(recurse=False)
        if name != "bias" and (parameter.ndim <= 1 or parameter in listed)
    }


def layer_decay_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning-rate factor of each parameter of a backbone, by its full name.

    It is ``decay ** (num_layers + 1 - layer_id)``, as in detectron2's ``get_vit_lr_decay_rate``: the last block learns
    at ``decay`` times the rate of FPN and heads, the embedding at ``decay ** (num_layers + 1)``.

    Args:
        model: a model with a :class:`backbones.backbone.Backbone`.
        decay: above 0 to 1; 1 means no decay.

    Raises:
        ConfigError: for another decay, or one below 1 where no module has layers.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"{_LAYER_DECAY} is {decay!r}: it must be above 0 and at most 1.0 (no decay)")
    if decay == 1:
        return {}
    factors = {
        f"{prefix}.{name}".lstrip("."): decay ** (module.num_layers + 1 - module.layer_id(name))
        for prefix, module in model.named_modules()
        if hasattr(module, "layer_id")
        for name, _ in module.named_parameters()
    }
    if not factors:
        raise ConfigError(f"{_LAYER_DECAY} is {decay}, and this backbone does not number its layers: set it to 1.0")
    return factors


# -- optimizer and schedule ------------------------------------------------------------------------


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW or SGD on :func:`parameter_groups`, with the clipping of ``SOLVER.CLIP_GRADIENTS``.

    ``CLIP_TYPE: full_model`` is :func:`clip_full_model`; ``value`` and ``norm`` are detectron2's. Each step raises
    FloatingPointError, before any weight changes, where the norm of all gradients is not finite.

    Raises:
        ConfigError: for an unknown ``SOLVER.OPTIMIZER``, or as :func:`parameter_groups`.
    """
    solver, clip = cfg.SOLVER, cfg.SOLVER.CLIP_GRADIENTS
    check_choice("SOLVER.OPTIMIZER", solver.OPTIMIZER, OPTIMIZERS)
    groups = parameter_groups(
        model,
        base_lr=solver.BASE_LR,
        weight_decay=solver.WEIGHT_DECAY,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        lr_multipliers=solver.LR_MULTIPLIERS,
        layer_decay=solver.LAYER_DECAY,
    )
    # On a CPU the formula of earlier versions, to the bit.
    fused = True if next(model.parameters()).is_cuda else None
    if solver.OPTIMIZER == "ADAMW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=solver.BASE_LR, fused=fused)
    else:
        optimizer = torch.optim.SGD(
            groups, lr=solver.BASE_LR, momentum=solver.MOMENTUM, nesterov=solver.NESTEROV, fused=fused
        )
    is_full_model = clip.ENABLED and clip.CLIP_TYPE == "full_model"
    if not is_full_model:
        optimizer = maybe_add_gradient_clipping(cfg, optimizer)
    clip_full_model(optimizer, clip.CLIP_VALUE if is_full_model else math.inf, norm_type=clip.NORM_TYPE)
    return optimizer


def clip_full_model(optimizer: torch.optim.Optimizer, max_norm: float, *, norm_type: float = 2.0) -> None:
    """Before each step of ``optimizer``, scale all gradients together to a norm of at most ``max_norm``.

    With a finite ``max_norm`` the norm before clipping goes to detectron2's event storage as ``gradient_norm``. A norm
    that is not finite raises FloatingPointError in ``optimizer.step()``, before any weight changes. With a list
    ``deferred_norms``, an attribute of a fused optimizer, torch's flag ``found_inf`` is set instead, and the list gets
    the norm and whether it is limited.
    """

    def clip(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = nn.utils.get_total_norm([parameter.grad for parameter in parameters], norm_type=norm_type)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            # A first step of torch's without effect would leave them undefined.
            for group in optimizer.param_groups:
                for parameter in group["params"] if group.get("momentum") else ():
                    if "momentum_buffer" not in optimizer.state[parameter]:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if hasattr(optimizer, "deferred_norms"):
            optimizer.found_inf = torch.maximum(found_inf, (~total.isfinite()).float())
            optimizer.deferred_norms.append((total, max_norm < math.inf))
            if max_norm < math.inf:
                nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
            return
        norm = total.item()
        if found_inf is not None and found_inf.item():
            # An overflow, after which the loss scaler makes a fused optimizer's step one without effect.
            return
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradients is {norm}")
        if max_norm < math.inf:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
            if has_event_storage():
                get_event_storage().put_scalar("gradient_norm", norm)

    optimizer.register_step_pre_hook(clip)


def build_lr_scheduler(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Build one of detectron2's schedules, or ``WarmupPolyLR``.

    The latter is, after detectron2's warm-up, ``BASE_LR_END + (BASE_LR - BASE_LR_END) (1 - t) ** POLY_LR_POWER``, where
    t goes from 0 at the first iteration to 1 after the last; fvcore's polynomial decay ends at 0.

    Raises:
        ConfigError: for a last learning rate that is not a decay, or steps that are not within the run.
    """
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME != "WarmupPolyLR":
        try:
            return build_detectron2_lr_scheduler(cfg, optimizer)
        except (ValueError, AssertionError) as error:
            raise ConfigError(
                f"SOLVER.LR_SCHEDULER_NAME {solver.LR_SCHEDULER_NAME} cannot have these SOLVER.STEPS, MAX_ITER, "
                f"BASE_LR, BASE_LR_END and WARMUP_ITERS: {one_line(error)}"
            ) from error
    if not 0 <= solver.BASE_LR_END <= solver.BASE_LR:
        raise ConfigError(
            f"SOLVER.BASE_LR_END is {solver.BASE_LR_END}: it must be 0 to SOLVER.BASE_LR, {solver.BASE_LR}"
        )
    end = solver.BASE_LR_END / solver.BASE_LR

    def decay(where: float) -> float:
        return end + (1 - end) * max(1 - where, 0.0) ** solver.POLY_LR_POWER

    schedule = WarmupParamScheduler(
        decay,
        solver.WARMUP_FACTOR,
        min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0),
        solver.WARMUP_METHOD,
        solver.RESCALE_INTERVAL,
    )
    return LRMultiplier(optimizer, multiplier=schedule, max_iter=solver.MAX_ITER)


def main_group(optimizer: torch.optim.Optimizer) -> int:
    """Return the index of the parameter group whose learning rate is logged.

    It is the first with the optimizer's own learning rate, ``SOLVER.BASE_LR``, and not a multiple of it; or else 0.
    """
    base_lr = optimizer.defaults["lr"]
    initial = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return initial.index(base_lr) if base_lr in initial else 0


# -- schedules that depend on the data and the batch -----------------------------------------------


def schedule_by_epochs(cfg: CfgNode, num_images: int, overridden: Collection[str] = ()) -> tuple[CfgNode, list[str]]:
    """Return a config whose iterations are those of ``SOLVER.EPOCHS``, and lines for the log.

    An epoch is ``num_images / SOLVER.IMS_PER_BATCH`` iterations; fractions are rounded up.

    - ``SOLVER.MAX_ITER`` is all epochs.
    - ``SOLVER.STEPS`` keep their fractions of ``MAX_ITER``; schedules without steps keep their shape anyway.
    - ``SOLVER.WARMUP_ITERS`` stay, but are at most 5 % of ``MAX_ITER``.
    - ``TEST.EVAL_PERIOD`` and ``SOLVER.CHECKPOINT_PERIOD`` are an epoch of 1000 iterations or more; of shorter epochs
      as many as make 100 iterations, and a twentieth of the run, at least.

    Each of these stays as it is where it is among the overrides, where ``SOLVER.MAX_ITER`` takes precedence over the
    epochs of a config file. ``SOLVER.EPOCHS`` is 0 in what is returned, so that a run that is resumed or evaluated with
    it has the same iterations. ``BASE_LR`` stays.

    Args:
        cfg: the config.
        num_images: images per epoch, without the images that ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` drops.
        overridden: keys that the user set for this run.

    Raises:
        ConfigError: for a negative number of epochs, or where epochs and iterations both are among the overrides.
    """
    solver = cfg.SOLVER
    if solver.EPOCHS < 0:
        raise ConfigError(f"SOLVER.EPOCHS is {solver.EPOCHS}: it must be 1 or more, or 0 for SOLVER.MAX_ITER as it is")
    if solver.EPOCHS and {"SOLVER.EPOCHS", "SOLVER.MAX_ITER"} <= set(overridden):
        raise ConfigError("SOLVER.EPOCHS and SOLVER.MAX_ITER both set the length of training: leave one out")
    if not solver.EPOCHS or "SOLVER.MAX_ITER" in overridden:
        unused = f"SOLVER.MAX_ITER {solver.MAX_ITER} overrides SOLVER.EPOCHS {solver.EPOCHS} of the config"
        return with_overrides(cfg, {"SOLVER.EPOCHS": 0}), [unused] if solver.EPOCHS else []
    epochs, epoch = solver.EPOCHS, num_images / solver.IMS_PER_BATCH
    iterations = math.ceil(epochs * epoch)
    short = max(math.ceil(_MIN_PERIOD / epoch), math.ceil(epochs / _MAX_EVALUATIONS))
    period = min(math.ceil(epoch * (1 if epoch >= _LONG_EPOCH else short)), iterations)
    steps = tuple(solver.STEPS)
    if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        scaled = (round(step / solver.MAX_ITER * iterations) for step in steps if step < solver.MAX_ITER)
        # In a run of a few iterations two steps may coincide, or reach its end.
        steps = tuple(sorted({step for step in scaled if 0 < step < iterations}))
    values = {
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": steps,
        "SOLVER.WARMUP_ITERS": min(solver.WARMUP_ITERS, math.ceil(_WARMUP_SHARE * iterations)),
        "TEST.EVAL_PERIOD": period,
        "SOLVER.CHECKPOINT_PERIOD": period,
    }
    values = {key: value for key, value in values.items() if key not in overridden}
    lines = [
        f"SOLVER.EPOCHS {epochs}: {num_images} training images, {solver.IMS_PER_BATCH} per iteration, "
        f"{epoch:.4g} iterations per epoch",
        f"SOLVER.EPOCHS {epochs} is " + " ".join(f"{key} {shlex.quote(str(value))}" for key, value in values.items()),
    ]
    return with_overrides(cfg, values | {"SOLVER.EPOCHS": 0}), lines


def scale_learning_rate(cfg: CfgNode) -> tuple[CfgNode, list[str]]:
    """Return a config with the learning rate of ``SOLVER.REFERENCE_BATCH_SIZE``, and lines for the log.

    ``SOLVER.BASE_LR`` and ``BASE_LR_END`` are multiplied by ``IMS_PER_BATCH / REFERENCE_BATCH_SIZE``. That key is 0 in
    what is returned: a run that is resumed with it has the same learning rate.
    """
    solver = cfg.SOLVER
    if not solver.REFERENCE_BATCH_SIZE:
        return cfg, []
    scale = solver.IMS_PER_BATCH / solver.REFERENCE_BATCH_SIZE
    values = {f"SOLVER.{key}": solver[key] * scale for key in ("BASE_LR", "BASE_LR_END")}
    line = (
        f"SOLVER.REFERENCE_BATCH_SIZE {solver.REFERENCE_BATCH_SIZE}: SOLVER.IMS_PER_BATCH is "
        f"{solver.IMS_PER_BATCH}, and SOLVER.BASE_LR {solver.BASE_LR:g} becomes {values['SOLVER.BASE_LR']:g}"
    )
    return with_overrides(cfg, values | {"SOLVER.REFERENCE_BATCH_SIZE": 0}), [line]
