"""Detectors written so that all exporters take them: the same answers as detectron2's, in fixed steps on plain tensors.

detectron2's own inference branches on numbers that depend on the image, makes lists of Instances and loops over
classes; torch.export refuses that. Here is its equivalent in one place. Letters: B images, L levels, A anchors a place,
K classes, N candidates, P proposals, D detections.

- What is fewer than asked for is filled up: a level with fewer than ``topk`` candidates gets some with a score that
  never passes, so that no number of candidates is decided while the model is recorded.
- Non-maximum suppression of groups (classes, levels, images) is one call: each group is moved to a field of its own on
  a grid. In a row, as torchvision has them, the last of 80 classes would lie at 10^5 pixels, where float32 rounds to
  0.008 pixels; on a grid it is a tenth of that.
- "The best n of each image" is a comparison of ranks, not a loop over images.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from projects_vil.export.exportable.filling import filled_up


class ExportableDetector(nn.Module):
    """A detector as a function of one tensor of pixels to plain tensors.

    Args:
        detector: in eval mode.
        batched: whether the input is a batch of images of one size.
        fixed_number: of detections that come out for each image, see :func:`.filling.filled_up`; None for as many as
            there are.
        size: height and width of all images that it is recorded for; None for any.

    Input: (3, H, W), or (B, 3, H, W) if batched: uint8 or floating point, 0 to 255, channels in ``INPUT.FORMAT``.

    Output: a tuple, in the order of ``output_names``: boxes (D, 4), XYXY in pixels of the input, inside the image and
    with an area; scores (D,), float32, from the highest; classes (D,), int64; with masks, masks (D, 1, S, S), the
    probability of each place of a box, S = 28 by default; if batched, image_index (D,), int64. With ``fixed_number``
    N, all of them are (N, ...), or (B, N, ...) if batched, image_index is left out, and the last is count, (1,) or
    (B,), int64: how many of the rows are detections.
    """

    def __init__(
        self,
        detector: nn.Module,
        *,
        batched: bool = False,
        fixed_number: int | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.detector = detector
        self.batched = batched
        self.fixed_number = fixed_number
        self.size = size
        self.input_names = ("images",) if batched else ("image",)
        self.output_names: tuple[str, ...] = ("boxes", "scores", "classes", *(["masks"] if self.has_masks else []))
        if fixed_number is not None:
            self.output_names += ("count",)
        elif batched:
            self.output_names += ("image_index",)

    @property
    def has_masks(self) -> bool:
        """Whether masks come out."""
        return False

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """See the class."""
        # Before anything else: in other types than floating point TensorRT only takes images in.
        image = image.to(torch.promote_types(self.detector.pixel_mean.dtype, torch.float32))
        images = image if self.batched else image[None]
        size = images.shape[2], images.shape[3]
        outputs = self.detect(self.detector.backbone(self._normalised(images)), size)
        if self.fixed_number is not None:
            outputs = self._filled_up(outputs, images.shape[0] if self.batched else 1)
        return tuple(outputs[name] for name in self.output_names)

    def detect(self, features: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
        """The maps of FPN for images of ``size`` -> all outputs by name."""
        raise NotImplementedError

    def _filled_up(self, outputs: dict[str, Tensor], num_images: int) -> dict[str, Tensor]:
        rows = filled_up(outputs, number=self.fixed_number, num_images=num_images)
        count = rows.pop("count")
        return (rows if self.batched else {name: value[0] for name, value in rows.items()}) | {"count": count}

    def _images(self, image: Tensor, features: dict[str, Tensor]) -> dict[str, Tensor | int]:
        """Which image each box is of, where there may be several."""
        return {"image": image, "num_images": next(iter(features.values())).shape[0]} if self.batched else {}

    def _normalised(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), 0 to 255, floats -> normalised, padded below and on the right for FPN, in the model's type."""
        mean, std = self.detector.pixel_mean, self.detector.pixel_std
        images = (images - mean.float()) / std.float()
        divisor = max(self.detector.backbone.size_divisibility, 1)
        height, width = images.shape[2], images.shape[3]
        # In this form a recorded size is a product with the divisor, and all that follow from it are simple.
        rows, cols = (height + divisor - 1) // divisor, (width + divisor - 1) // divisor
        images = F.pad(images, (0, cols * divisor - width, 0, rows * divisor - height))
        return images.to(next(self.detector.backbone.parameters()).dtype)
