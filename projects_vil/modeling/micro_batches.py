"""The loss of a batch from those of its micro-batches, for gradient accumulation."""

from detectron2.modeling import RetinaNet
from detectron2.utils.events import get_event_storage
from torch import nn

# The attribute of detectron2's RetinaNet with the running mean of its positive anchors, and its first value.
_NORMALIZER, _FIRST_NORMALIZER = "loss_normalizer", 100


class MicroBatches:
    """Weights of the micro-batches' losses: the loss of the batch is the sum of weight x loss, over divisor.

    RetinaNet's losses are sums over a batch, divided by a running mean of its positive anchors; the result is divided
    by the mean that the whole batch would have had. Any other model's losses are averaged: if a model divides by a
    number that differs between micro-batches (Mask R-CNN: sampled proposals, masks of foreground proposals; Semantic
    FPN: labelled pixels), the result is not the loss of the whole batch.

    Args:
        model: without DistributedDataParallel around it.

    Attributes:
        total: positive anchors of all micro-batches so far, or the number of micro-batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._model = model
        self._is_retinanet = isinstance(model, RetinaNet)
        self._before = getattr(model, _NORMALIZER, _FIRST_NORMALIZER)

    def restore(self) -> None:
        """Restore the running mean from before the batch: before each micro-batch, and if the batch is skipped."""
        if self._is_retinanet:
            setattr(self._model, _NORMALIZER, self._before)

    def weight(self, num_images: int) -> float:
        """Return the weight of the micro-batch whose loss was just computed."""
        if not self._is_retinanet:
            self.total += 1
            return 1.0
        positives, _ = get_event_storage().latest()["num_pos_anchors"]
        self.total += round(positives * num_images)
        return getattr(self._model, _NORMALIZER)

    def divisor(self) -> float:
        """Return the divisor after the last micro-batch, and set the running mean to that after the whole batch."""
        if not self._is_retinanet:
            return self.total
        self.restore()
        return self._model._ema_update(_NORMALIZER, max(self.total, 1), _FIRST_NORMALIZER)
