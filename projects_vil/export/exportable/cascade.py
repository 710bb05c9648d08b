"""Cascade R-CNN and Cascade Mask R-CNN in fixed steps on plain tensors."""

from torch import Tensor, nn

from projects_vil.export.exportable.boxes import clip, decode
from projects_vil.export.exportable.rcnn import ExportableRCNN, pool, probabilities


class ExportableCascadeRCNN(ExportableRCNN):
    """detectron2's Cascade R-CNN, with masks or without: see :class:`.ExportableDetector`.

    Each head moves the boxes of the one before. The boxes and thresholds are those of the last, the scores the mean of
    all (Cai and Vasconcelos 2018, section 4).
    """

    @property
    def _predictor(self) -> nn.Module:
        return self.detector.roi_heads.box_predictor[-1]

    def _judged(
        self, maps: list[Tensor], proposals: Tensor, image: Tensor, size: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        heads = self.detector.roi_heads
        scores = []
        for head, predictor in zip(heads.box_head, heads.box_predictor, strict=True):
            logits, deltas = predictor(head(pool(heads.box_pooler, maps, proposals, image)))
            scores.append(probabilities(predictor, logits))
            # One box for all classes: none is chosen before the last head.
            proposals = clip(decode(predictor.box2box_transform, deltas, proposals), size)
        return sum(scores) * (1.0 / len(scores)), proposals[:, None]
