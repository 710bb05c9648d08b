"""What is done between iterations."""

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import InputError
from backbones.attention.performer import PerformerAttention, redraw_features


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
