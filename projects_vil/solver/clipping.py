"""Clipping of all gradients together, and their norm in the log."""

import torch
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import nn

GRADIENT_NORM = "gradient_norm"


def clip_full_model(optimizer: torch.optim.Optimizer, max_norm: float, *, norm_type: float = 2.0) -> None:
    """Scale all gradients together to a norm of at most ``max_norm`` before every step of ``optimizer``.

    A norm that is not finite raises, so that the weights stay as the last checkpoint can restore them. The norm before
    clipping goes to detectron2's event storage, where there is one, and so into metrics.json. Under AMP the scaler has
    taken its scale off, and skipped steps with infinite gradients, before.
    """

    def clip(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type, error_if_nonfinite=True)
        if has_event_storage():
            get_event_storage().put_scalar(GRADIENT_NORM, norm.item())

    optimizer.register_step_pre_hook(clip)
