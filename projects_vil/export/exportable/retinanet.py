"""RetinaNet in fixed steps on plain tensors."""

import torch
from torch import Tensor

from projects_vil.export.exportable.boxes import clip, decode, grid_anchors, has_area, per_anchor
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.exportable.nms import best_above, best_without_overlap, divided


class ExportableRetinaNet(ExportableDetector):
    """detectron2's RetinaNet: see :class:`ExportableDetector`."""

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        model = self.detector
        maps = [features[name] for name in model.head_in_features]
        logits, deltas = model.head(maps)
        scores, boxes, classes, image = [], [], [], []
        for level, anchors in enumerate(grid_anchors(model.anchor_generator, maps)):
            of_image, place, best = best_above(
                per_anchor(logits[level], model.num_classes).float().sigmoid().flatten(1),
                model.test_score_thresh,
                model.test_topk_candidates,
                batched=self.batched,
            )
            anchor = divided(place, model.num_classes)
            chosen = per_anchor(deltas[level], 4)[of_image, anchor]
            boxes.append(decode(model.box2box_transform, chosen, anchors[anchor]))
            scores.append(best)
            classes.append(place % model.num_classes)
            image.append(of_image)
        # (N,) and (N, 4)
        scores, boxes, classes, image = (torch.cat(parts) for parts in (scores, boxes, classes, image))
        kept = best_without_overlap(
            boxes,
            scores,
            group=image * model.num_classes + classes,
            groups_per_image=model.num_classes,
            **self._images(image, features),
            threshold=model.test_nms_thresh,
            number=model.max_detections_per_image,
        )
        boxes, scores, classes, image = clip(boxes[kept], size), scores[kept], classes[kept], image[kept]
        kept = has_area(boxes).nonzero()[:, 0]
        return {
            "boxes": boxes[kept],
            "scores": scores[kept],
            "classes": classes[kept],
            "image_index": image[kept],
        }
