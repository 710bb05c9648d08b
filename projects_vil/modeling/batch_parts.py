"""The loss of a batch that a model sees in parts."""

from detectron2.modeling import RetinaNet
from detectron2.utils.events import get_event_storage
from torch import nn

_NORMALIZER = "loss_normalizer"
# Where detectron2's RetinaNet starts from.
_FIRST_NORMALIZER = 100


class BatchParts:
    """What the losses of the parts count in the loss of the batch: sum of weight x loss over all parts / divisor.

    RetinaNet's losses are sums over a batch, divided by a running mean of its positive anchors: the parts are divided
    by the one that the whole batch would have had. Any other model's losses are taken for means, of which the mean is
    taken: where a model divides by what differs between the parts (Mask R-CNN: sampled proposals, masks of foreground
    proposals; Semantic FPN: labelled pixels) it is not that of the whole batch.

    Args:
        model: without DistributedDataParallel around it.

    Attributes:
        total: positive anchors of all parts so far, or the number of parts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._model = model
        self._is_retinanet = isinstance(model, RetinaNet)
        self._before = getattr(model, _NORMALIZER, None)

    def restore(self) -> None:
        """Give the model the running mean from before the batch: before each part, and where the batch is left out."""
        if not self._is_retinanet:
            return
        if self._before is not None:
            setattr(self._model, _NORMALIZER, self._before)
        elif hasattr(self._model, _NORMALIZER):
            delattr(self._model, _NORMALIZER)

    def weight(self, num_images: int) -> float:
        """Of the part that the model has just seen."""
        if not self._is_retinanet:
            self.total += 1
            return 1.0
        positives, _ = get_event_storage().latest()["num_pos_anchors"]
        self.total += round(positives * num_images)
        return getattr(self._model, _NORMALIZER)

    def divisor(self) -> float:
        """After the last part; the model's running mean is that after the whole batch then."""
        if not self._is_retinanet:
            return self.total
        self.restore()
        return self._model._ema_update(_NORMALIZER, max(self.total, 1), _FIRST_NORMALIZER)
