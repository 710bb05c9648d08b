"""Run exported files in their own runtimes, and convert their outputs to detectron2's."""

from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.layers import paste_masks_in_image
from detectron2.structures import Boxes, Instances
from torch import Tensor

from backbones import ConfigError
from projects_vil.export.formats import format_of, load_model
from projects_vil.export.metadata import check_input, read_metadata
from projects_vil.export.traceable import unpad_detections


class ExportedModel:
    """An exported file in its own runtime, with its metadata.

    Attributes:
        path: the file.
        metadata: see :func:`projects_vil.export.metadata.describe_model`.

    Raises:
        ConfigError: for a file that is missing, damaged, without metadata or of an unknown format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file_format = format_of(self.path)
        self.metadata = read_metadata(self.path)
        self.output_names = tuple(output["name"] for output in self.metadata["outputs"])
        self.batched = self.metadata["input"]["batched"]
        self.dtype = getattr(torch, self.metadata["input"]["dtype"])
        self._run = load_model(self.path)

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name for (3, H, W), or (B, 3, H, W) for a batched model, 0 to 255.

        The padding of a model with a fixed number of detections is removed.

        Raises:
            ConfigError: for sizes and batches that the model does not take, and for floating-point images where it
                takes uint8; other types are cast.
        """
        if images.is_floating_point() and not self.dtype.is_floating_point:
            raise ConfigError(f"{self.path} takes {self.dtype} images: export it with input_dtype float32 for others")
        check_input(self.metadata["input"], images.shape, what=str(self.path))
        with torch.no_grad():
            outputs = dict(zip(self.output_names, self._run(images.to(self.dtype)), strict=True))
        if "count" not in outputs:
            return outputs
        if self.batched:
            return unpad_detections(outputs)
        count = int(outputs.pop("count"))
        return {name: value[:count] for name, value in outputs.items()}

    def run_each(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return the outputs for each of several images (3, H, W) of one size: in one batch if the model is batched."""
        if not self.batched:
            return [self(image) for image in images]
        outputs = self(torch.stack(list(images)))
        index = outputs.pop("image_index")
        return [{name: value[index == i] for name, value in outputs.items()} for i in range(len(images))]

    def as_detectron2(self, batch: Sequence[dict]) -> list[dict[str, Instances]]:
        """Run with the interface of detectron2's models, as for its evaluators.

        [{"image": (3, H, W), "height", "width"}] -> [{"instances"}], in pixels of that height and width.
        """
        results = []
        for inputs in batch:
            (outputs,) = self.run_each([inputs["image"]])
            height, width = inputs["image"].shape[-2:]
            file_size = inputs.get("height", height), inputs.get("width", width)
            results.append({"instances": to_instances(outputs, (height, width), file_size)})
        return results


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int], *, threshold: float = 0.5) -> Tensor:
    """Paste masks into their boxes: (N, 1, S, S) probabilities, (N, 4) XYXY -> (N, height, width) bool.

    Args:
        size: height and width of the image; boxes are in its pixels.
    """
    # Without any mask detectron2 returns uint8.
    return paste_masks_in_image(masks[:, 0].float(), boxes.float(), size, threshold=threshold).bool()


def to_instances(outputs: dict[str, Tensor], size: tuple[int, int], file_size: tuple[int, int]) -> Instances:
    """Return the detections of an exported model as detectron2's Instances.

    Args:
        outputs: outputs by name, in an image of ``size`` (height, width), which may have been padded; boxes are clipped
            to it.
        file_size: height and width before the image was resized: boxes are scaled to it, and masks pasted into it.
    """
    boxes = Boxes(outputs["boxes"].clone())
    boxes.scale(file_size[1] / size[1], file_size[0] / size[0])
    instances = Instances(tuple(file_size), scores=outputs["scores"], pred_classes=outputs["classes"])
    if "masks" in outputs:
        # Before clipping: a mask covers the whole box.
        instances.pred_masks = paste_masks(outputs["masks"], boxes.tensor, file_size)
    boxes.clip(file_size)
    instances.pred_boxes = boxes
    return instances[boxes.nonempty()]
