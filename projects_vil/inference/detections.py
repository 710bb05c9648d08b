"""What a detector finds in one image."""

from collections import Counter

import numpy as np
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances

from projects_vil.checkpoint import Categories
from projects_vil.inference.sources import ImageSource
from projects_vil.visualization import draw_instances

DRAWN_FROM = 0.5  # the score of what is drawn where nothing else is said
LABELLED_SIDE = 1000  # pixels of the longer side, above which labels grow with the image


class Detections:
    """The objects in one image, from the highest score; N of them, on the CPU, in pixels of the (upright) file.

    Args:
        instances: detectron2's, as it returns them.
        categories: the classes that ``pred_classes`` are places in.
        source: the image, to draw on. A file is read again, and an array is kept, not copied.
        drawn_from: the lowest score of what is drawn where :meth:`draw` is told no other.

    Attributes:
        instances: detectron2's, with ``pred_boxes``, ``scores``, ``pred_classes`` and, of a Mask R-CNN, ``pred_masks``.
        categories: as above.
    """

    def __init__(
        self, instances: Instances, categories: Categories, source: ImageSource, *, drawn_from: float = DRAWN_FROM
    ) -> None:
        self.instances = instances
        self.categories = categories
        self.source = source
        self.drawn_from = drawn_from

    def __len__(self) -> int:
        return len(self.instances)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in Counter(self.names).most_common())
        kind = "detection" if len(self) == 1 else "detections"
        return f"<{len(self)} {kind}{': ' if counts else ''}{counts}>"

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the image."""
        return tuple(self.instances.image_size)

    @property
    def boxes(self) -> np.ndarray:
        """(N, 4) float32: left, top, right, bottom."""
        return self.instances.pred_boxes.tensor.numpy()

    @property
    def scores(self) -> np.ndarray:
        """(N,) float32, in 0..1."""
        return self.instances.scores.numpy()

    @property
    def classes(self) -> np.ndarray:
        """(N,) int64: places in ``categories.names`` and ``categories.ids``, from 0."""
        return self.instances.pred_classes.numpy()

    @property
    def names(self) -> list[str]:
        """The names of the N classes."""
        return [self.categories.names[index] for index in self.instances.pred_classes.tolist()]

    @property
    def masks(self) -> np.ndarray | None:
        """(N, height, width) bool; None of a detector without masks."""
        return self.instances.pred_masks.numpy() if self.instances.has("pred_masks") else None

    def draw(self, *, score_threshold: float | None = None, longer_side: int = 0) -> np.ndarray:
        """The image with boxes, masks and labels: (height, width, 3) uint8 RGB.

        Args:
            score_threshold: the lowest score of what is drawn, in [0, 1]; None for the detector's, or 0.5 where it was
                loaded without one.
            longer_side: pixels that a smaller image is enlarged to, so that labels can be read.

        Raises:
            InputError: where the image's file cannot be read any more.
        """
        threshold = self.drawn_from if score_threshold is None else score_threshold
        drawn = instances_to_coco_json(self.instances[self.instances.scores >= threshold], 0)
        pixels = self.source.read()
        longer = max(pixels.shape[:2])
        return draw_instances(
            pixels,
            drawn,
            self.categories.metadata,
            scale=max(longer_side / longer, 1),
            label_size=max(longer / LABELLED_SIDE, 1),
        )

    def to_coco(self, image_id: int) -> list[dict]:
        """COCO's format of results, with the category ids of the dataset that the detector was trained on.

        A dict for each object: ``image_id``, ``category_id``, ``bbox`` (left, top, width, height), ``score`` and, of a
        Mask R-CNN, ``segmentation`` (run lengths).
        """
        ids = self.categories.ids
        return [
            found | {"category_id": ids[found["category_id"]]}
            for found in instances_to_coco_json(self.instances, image_id)
        ]

    def as_detectron2(self) -> dict[str, Instances]:
        """detectron2's output for the image, which ``supervision.Detections.from_detectron2`` and others take."""
        return {"instances": self.instances}
