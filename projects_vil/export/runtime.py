"""Exported files in their own runtimes, and their answers as detectron2's."""

from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.layers import paste_masks_in_image
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from backbones import InputError
from projects_vil.export.exportable.filling import without_filling
from projects_vil.export.formats import FORMATS, format_of, load_model
from projects_vil.export.metadata import check_batch, check_digest, check_input, check_machine, read_metadata


class ExportedModel:
    """An exported file in its own runtime, with the metadata beside it.

    Attributes:
        path: of the file.
        metadata: see :func:`projects_vil.export.metadata.describe_model`.

    Raises:
        InputError: for a file that is missing, damaged or of no known format, one without metadata, or one that was
            built for another machine.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file_format = format_of(self.path)
        self.metadata = read_metadata(self.path)
        check_digest(self.path, self.metadata)
        check_machine(self.path, self.metadata, FORMATS[self.file_format].built_for())
        self.output_names = tuple(output["name"] for output in self.metadata["outputs"])
        self.batched = self.metadata["input"]["batched"]
        self.dtype = getattr(torch, self.metadata["input"]["dtype"])
        self._run = load_model(self.path)

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """(3, H, W), or (B, 3, H, W) for a batched model, 0 to 255 -> the outputs by name.

        Of a model with a fixed number of detections, those that are some: as other models give them.

        Raises:
            InputError: for an image smaller or larger than the model takes, more of them than it takes, and for
                floating-point images where it takes uint8; other types are cast.
        """
        if images.is_floating_point() and not self.dtype.is_floating_point:
            raise InputError(f"{self.path} takes {self.dtype} images: export it with --input-dtype float32 for others")
        check_input(self.metadata["input"], images.shape[-2:], what=str(self.path))
        if self.batched:
            check_batch(self.metadata, len(images), what=str(self.path))
        with torch.no_grad():
            found = dict(zip(self.output_names, self._run(images.to(self.dtype)), strict=True))
        if "count" not in found:
            return found
        if self.batched:
            return without_filling(found)
        count = int(found.pop("count"))
        return {name: value[:count] for name, value in found.items()}


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int], *, threshold: float = 0.5) -> Tensor:
    """Put masks where their boxes are: (N, 1, S, S) probabilities, (N, 4) XYXY -> (N, height, width) bool.

    Args:
        size: height and width of the image, in whose pixels the boxes are.
    """
    # Of no mask detectron2 makes uint8.
    return paste_masks_in_image(masks[:, 0].float(), boxes.float(), size, threshold=threshold).bool()


class ExportedDetector(nn.Module):
    """An exported model behind detectron2's interface, so that its evaluators and drawings take it."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Sequence[dict]) -> list[dict[str, Instances]]:
        """[{"image": (3, H, W), "height", "width"}] -> [{"instances"}], in pixels of that height and width."""
        return [{"instances": self._instances(inputs)} for inputs in batch]

    def _instances(self, inputs: dict) -> Instances:
        image = inputs["image"]
        height, width = image.shape[-2:]
        found = self.model(image[None] if self.model.batched else image)
        return to_instances(found, (height, width), (inputs.get("height", height), inputs.get("width", width)))


def to_instances(found: dict[str, Tensor], size: tuple[int, int], file_size: tuple[int, int]) -> Instances:
    """Detections of an exported model as detectron2's Instances.

    Args:
        found: by name, in an image of ``size`` (height, width), which may have been padded; boxes are cut at its end.
        file_size: of the image before it was resized: what boxes are scaled to, and masks pasted into.
    """
    boxes = Boxes(found["boxes"].clone())
    boxes.scale(file_size[1] / size[1], file_size[0] / size[0])
    instances = Instances(tuple(file_size), scores=found["scores"], pred_classes=found["classes"])
    if "masks" in found:
        # A mask is that of the whole box.
        instances.pred_masks = paste_masks(found["masks"], boxes.tensor, file_size)
    boxes.clip(file_size)
    instances.pred_boxes = boxes
    return instances[boxes.nonempty()]
