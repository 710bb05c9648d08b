"""Learning-rate schedules: detectron2's, and polynomial decay."""

import torch
from detectron2.config import CfgNode
from detectron2.solver import LRMultiplier, WarmupParamScheduler
from detectron2.solver import build_lr_scheduler as build_detectron2_lr_scheduler
from fvcore.common.param_scheduler import ParamScheduler

from backbones import InputError
from backbones.utils.errors import check_choice

LR_SCHEDULERS = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR", "WarmupPolyLR")


class PolynomialDecay(ParamScheduler):
    """From 1 at the start to ``end`` at the end: end + (1 - end) (1 - where) ** power."""

    def __init__(self, *, power: float, end: float = 0.0) -> None:
        self.power = power
        self.end = end

    def __call__(self, where: float) -> float:
        return self.end + (1 - self.end) * max(1 - where, 0.0) ** self.power


def build_lr_scheduler(cfg: CfgNode, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """detectron2's schedules, and ``WarmupPolyLR``: :class:`PolynomialDecay` after detectron2's warm-up.

    Raises:
        InputError: for an unknown ``SOLVER.LR_SCHEDULER_NAME``, or a power or last rate that is no decay.
    """
    solver = cfg.SOLVER
    check_choice("SOLVER.LR_SCHEDULER_NAME", solver.LR_SCHEDULER_NAME, LR_SCHEDULERS)
    if solver.LR_SCHEDULER_NAME != "WarmupPolyLR":
        return build_detectron2_lr_scheduler(cfg, optimizer)
    if not solver.POLY_LR_POWER > 0:
        raise InputError(f"SOLVER.POLY_LR_POWER is {solver.POLY_LR_POWER}: it is above 0")
    if not 0 <= solver.BASE_LR_END <= solver.BASE_LR:
        raise InputError(f"SOLVER.BASE_LR_END is {solver.BASE_LR_END}: it is 0 to SOLVER.BASE_LR, {solver.BASE_LR}")
    schedule = WarmupParamScheduler(
        PolynomialDecay(power=solver.POLY_LR_POWER, end=solver.BASE_LR_END / solver.BASE_LR),
        solver.WARMUP_FACTOR,
        min(solver.WARMUP_ITERS / solver.MAX_ITER, 1.0),
        solver.WARMUP_METHOD,
        solver.RESCALE_INTERVAL,
    )
    return LRMultiplier(optimizer, multiplier=schedule, max_iter=solver.MAX_ITER)


def shown_group(optimizer: torch.optim.Optimizer) -> int:
    """The place of the parameter group whose learning rate is said of a run.

    It is the largest of those that begin at the optimizer's own rate, ``SOLVER.BASE_LR``, and not at a layer's or a
    pattern's share of it; where all have a share, the largest.
    """
    groups = optimizer.param_groups
    whole = [i for i, group in enumerate(groups) if group.get("initial_lr", group["lr"]) == optimizer.defaults["lr"]]
    return max(whole or range(len(groups)), key=lambda i: len(groups[i]["params"]))
