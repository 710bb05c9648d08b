"""A PointRend mask head for batches without objects. Importing this module registers it."""

from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.projects.point_rend import PointRendMaskHead
from detectron2.structures import Instances
from torch import Tensor


@ROI_MASK_HEAD_REGISTRY.register()
class AnyBatchPointRendMaskHead(PointRendMaskHead):
    """detectron2's PointRend mask head with a loss of 0 for batches without objects, for which the original fails.

    Such batches occur after cropping, and with ``TEST.VALIDATION_LOSS``, which evaluates single images.
    """

    def _sample_train_points(self, coarse_mask: Tensor, instances: list[Instances]) -> tuple[Tensor, Tensor]:
        """(R, C, S, S) logits of R objects -> points (R, P, 2) in their boxes, and labels (R, P)."""
        if any(len(of_image) for of_image in instances):
            return super()._sample_train_points(coarse_mask, instances)
        number = self.mask_point_train_num_points
        return coarse_mask.new_zeros(0, number, 2), coarse_mask.new_zeros(0, number)
