"""Combine the losses of micro-batches into the loss of the batch, and save and restore RetinaNet's loss normalizer."""

from collections.abc import Sequence

from detectron2.modeling import RetinaNet
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import nn

# The first value of RetinaNet.loss_normalizer, the running mean of its positive anchors. The first step sets it.
_FIRST_NORMALIZER = 100


class MicroBatches:
    """Weights of the losses of micro-batches. The loss of the batch is the sum of weight x loss, divided by divisor.

    RetinaNet sums its losses over a batch and divides them by a running mean of its positive anchors. The result is
    divided by the mean after the whole batch, so it equals the loss of the whole batch. The losses of other models are
    averaged. This is only close to the loss of the whole batch if a model divides by a number that differs between
    micro-batches (Mask R-CNN: sampled proposals and foreground masks; Semantic FPN: labeled pixels).

    Args:
        model: The model without DistributedDataParallel.

    Attributes:
        total: Number of positive anchors so far (RetinaNet), or of micro-batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._model = model
        self._is_retinanet = isinstance(model, RetinaNet)
        self._before = getattr(model, "loss_normalizer", _FIRST_NORMALIZER)

    def restore(self) -> None:
        """Restore the running mean from before the batch, after a micro-batch without a weight or a skipped step."""
        if self._is_retinanet:
            self._model.loss_normalizer = self._before

    def weight(self, num_images: int) -> float:
        """Return the weight of the last micro-batch, and restore the running mean from before the batch."""
        if not self._is_retinanet:
            self.total += 1
            return 1.0
        positives, _ = get_event_storage().latest()["num_pos_anchors"]
        self.total += round(positives * num_images)
        weight = self._model.loss_normalizer
        self.restore()
        return weight

    def divisor(self) -> float:
        """Return the divisor after the last micro-batch, and update the running mean for the whole batch."""
        if not self._is_retinanet:
            return self.total
        return self._model._ema_update("loss_normalizer", max(self.total, 1), _FIRST_NORMALIZER)


def loss_normalizers(model: nn.Module) -> list[float | None]:
    """Return each rank's running mean of positive anchors, which RetinaNet has no buffer for; all ranks call this."""
    return comm.all_gather(getattr(model, "loss_normalizer", None))


def restore_loss_normalizer(model: nn.Module, saved: Sequence[float | None]) -> None:
    """Restore this rank's loss normalizer, or set the mean of all ranks if the number of processes has changed."""
    values = [value for value in saved if value is not None]
    if values:
        same = len(values) == len(saved) == comm.get_world_size()
        model.loss_normalizer = values[comm.get_rank()] if same else sum(values) / len(values)
