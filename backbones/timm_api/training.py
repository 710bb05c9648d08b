"""What training by timm's scripts needs beyond a model: LIT's slow offsets, and what is drawn anew on the way."""

from collections.abc import Iterable

import torch
from torch import nn

from backbones.attention.alternatives.performer import PerformerAttention, redraw_features, redraw_interval
from backbones.attention.sliding_chunk import draw_shifts
from backbones.layers.token_merging import DeformableTokenMerging
from backbones.utils.errors import InputError

# 1e-5 beside 1e-3 (LIT section 4.1)
OFFSET_LR_SCALE = 0.01


def slow_offsets(model: nn.Module) -> None:
    """Mark the offsets of deformable token merging for :class:`LITAdamW`."""
    for module in model.modules():
        if isinstance(module, DeformableTokenMerging):
            for parameter in module.offset.parameters():
                parameter.lr_scale = OFFSET_LR_SCALE


class LITAdamW(torch.optim.AdamW):
    """AdamW in which the offsets of deformable token merging learn at 0.01 of the rate: ``--opt litadamw``.

    The factor stands in the groups as ``lr_scale``, which timm's schedulers apply, also to the lowest rate.

    Raises:
        InputError: where the model has no offsets.
    """

    def __init__(self, params: Iterable, **options: object) -> None:
        params = list(params)
        if not params or not isinstance(params[0], dict):
            params = [{"params": params}]
        groups, scaled = [], False
        for group in params:
            split: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                split.setdefault(getattr(parameter, "lr_scale", 1.0), []).append(parameter)
            for scale, parameters in split.items():
                scaled = scaled or scale != 1
                groups.append({**group, "params": parameters, "lr_scale": scale * group.get("lr_scale", 1.0)})
        if not scaled:
            raise InputError("litadamw is for models with deformable token merging, lit_...: take adamw for others")
        super().__init__(groups, **options)


class Redraw:
    """Counts forward passes in training, and redraws random features before every 1 + 5T of epoch T."""

    def __init__(self, name: str, model: nn.Module, epoch_length: int, first_epoch: int) -> None:
        if not any(isinstance(module, PerformerAttention) for module in model.modules()):
            raise InputError(f"redraw_epoch_length: {name} has no random features to redraw")
        if epoch_length < 1 or first_epoch < 0:
            raise InputError(
                f"redraw_epoch_length={epoch_length}, redraw_first_epoch={first_epoch}: 1 or more, and 0 or more"
            )
        self.epoch_length = epoch_length
        self.iteration = epoch_length * first_epoch
        self.since = 0

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if not model.training:
            return
        if self.since >= redraw_interval(self.iteration // self.epoch_length):
            # The same in every process
            redraw_features(model, seed=self.iteration)
            self.since = 0
        self.since += 1
        self.iteration += 1


class Shift:
    """Counts forward passes in training, and draws shifts of local attention before the first ones."""

    def __init__(self, name: str, model: nn.Module, iterations: int, first_iteration: int) -> None:
        if not draw_shifts(model, seed=None):
            raise InputError(f"random_shift_iterations: {name} has no sliding chunks")
        if iterations < 1 or first_iteration < 0:
            raise InputError(
                f"random_shift_iterations={iterations}, random_shift_first_iteration={first_iteration}: 1 or more, and "
                "0 or more"
            )
        self.iterations = iterations
        self.iteration = first_iteration

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if model.training:
            # The same in every process
            draw_shifts(model, seed=self.iteration if self.iteration < self.iterations else None)
            self.iteration += 1
