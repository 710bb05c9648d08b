"""Averaged weights: an exponential moving average of them, which is what is evaluated and exported."""

from collections.abc import Callable

import torch
from detectron2.engine import HookBase
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from projects_vil.engine.steps import Steps, unwrapped


def average_of(model: nn.Module, *, decay: float) -> AveragedModel:
    """torch's averaged model, with a decay that warms up: after n steps it is min(decay, (1 + n) / (10 + n)).

    The average begins with the weights after the first step. Buffers are those of the model: the statistics of
    BatchNorm are averages already.

    Args:
        model: without DistributedDataParallel around it.
        decay: 0 or more, and below 1.
    """
    averaged = AveragedModel(model, multi_avg_fn=_warmed_up(decay))
    return averaged.requires_grad_(False)


def start_average(averaged: AveragedModel, model: nn.Module) -> None:
    """Let an average that has seen no step be the weights of a model."""
    averaged.module.load_state_dict(model.state_dict())


def _warmed_up(decay: float) -> Callable[[list[Tensor], list[Tensor], Tensor], None]:
    def update(averages: list[Tensor], weights: list[Tensor], steps: Tensor) -> None:
        number = int(steps)
        get_ema_multi_avg_fn(min(decay, (1 + number) / (10 + number)))(averages, weights, number)

    return update


class AverageWeights(HookBase):
    """Average the weights after each step that changed them.

    Args:
        averaged: of :func:`average_of`, for the trainer's model.
        steps: knows whether the last one changed the weights.
    """

    def __init__(self, averaged: AveragedModel, steps: Steps) -> None:
        self.averaged = averaged
        self.steps = steps

    def after_step(self) -> None:
        if self.steps.has_stepped:
            with torch.no_grad():
                self.averaged.update_parameters(unwrapped(self.steps.model))
