"""What follows from the iteration: random features and shifts, drawn anew, and the rate that is shown."""

import torch
from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from torch import nn

from backbones import InputError
from backbones.attention.alternatives.performer import PerformerAttention, redraw_features
from backbones.attention.sliding_chunk import draw_shifts
from projects_vil.solver import shown_group


class RedrawFeatures(HookBase):
    """Draw Performer's random features anew every ``period`` iterations (ViL appendix D).

    The iteration is the seed: all processes draw the same, and a resumed run draws as one that was never stopped.
    The features themselves are in the checkpoint.
    """

    def __init__(self, period: int) -> None:
        if period < 1:
            raise InputError(f"MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD is {period}: it is 1 or more iterations")
        self.period = period

    def before_train(self) -> None:
        """Start with the features of the first process: detectron2 does not share buffers."""
        if comm.get_world_size() > 1:
            for module in self.trainer.model.modules():
                if isinstance(module, PerformerAttention):
                    torch.distributed.broadcast(module.features, src=0)

    def before_step(self) -> None:
        if self.trainer.iter and self.trainer.iter % self.period == 0:
            redraw_features(self.trainer.model, seed=self.trainer.iter)


class LRScheduler(hooks.LRScheduler):
    """detectron2's, by whose name checkpoints know it; ``lr`` is that of :func:`~projects_vil.solver.shown_group`.

    detectron2 says that of the largest group, which layer-wise decay may have made a layer's.
    """

    def before_train(self) -> None:
        super().before_train()
        self._best_param_group_id = shown_group(self._optimizer)


class RandomShift(HookBase):
    """Until a share of the run, let local attention of ViL see one neighbouring chunk, drawn anew for each layer.

    The iteration is the seed: all processes draw the same, and a resumed run draws as one that was never stopped.

    Args:
        model: whose attention it is.
        until: the share of all iterations, 0 to 1; 0.875 in the official code's recipes.

    Raises:
        InputError: where the model has no such attention.
    """

    def __init__(self, model: nn.Module, until: float) -> None:
        if not draw_shifts(model, seed=None):
            raise InputError(
                f"MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL is {until}, and no stage has sliding_chunk attention: it is 0 "
                "there"
            )
        self.model = model
        self.until = until

    def before_step(self) -> None:
        is_on = self.trainer.iter < self.until * self.trainer.max_iter
        draw_shifts(self.model, seed=self.trainer.iter if is_on else None)
