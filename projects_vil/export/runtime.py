"""Run exported files in their own runtimes, and convert their outputs to detectron2's ``Instances``."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.layers import paste_masks_in_image
from detectron2.structures import Boxes, Instances
from torch import Tensor

from backbones import ConfigError
from backbones.errors import check_file, explained_errors
from projects_vil.export.formats import format_of, load_model
from projects_vil.export.traceable import unpad_detections
from projects_vil.files import content_hash, read_json

# The problem and the advice for ``explained_errors``
DAMAGED = ("has damaged metadata", "Export the model again.")


class ExportedModel:
    """An exported file in its own runtime, with its metadata.

    Args:
        path: The exported file.
        device: ``"cpu"``, or ``"cuda"`` for an ONNX file.

    Attributes:
        file_format: A key of ``FORMATS``.
        metadata: See :func:`projects_vil.export.describe_model`.
        output_names: The names of the outputs, in the order of the file.
        batched: Whether the model takes a batch.
        dtype: The dtype of the input.

    Raises:
        ConfigError: If the file is missing or damaged, has no metadata, or its runtime is not installed or cannot
            use the device.
    """

    def __init__(self, path: str | Path, *, device: str | torch.device = "cpu") -> None:
        self.path = Path(path)
        self.file_format = format_of(self.path)
        check_file(self.path, "file")
        # Read first: its SHA-256 detects a damaged file, which can crash a runtime.
        with explained_errors(path, *DAMAGED):
            metadata = read_metadata(self.path)
        self._run, embedded = load_model(self.path, device=device)
        if metadata is None and embedded is None:
            check_file(metadata_path(self.path), "file", key=f"the metadata of {path}")
        with explained_errors(path, *DAMAGED):
            inside = metadata if embedded is None else json.loads(embedded)
            self.metadata = inside if metadata is None else metadata
            if len(self.metadata["classes"]) != len(inside["classes"]):
                raise ConfigError(f"'{metadata_path(path)}' has another number of classes than the model. Restore it.")
            self.output_names = tuple(output["name"] for output in self.metadata["outputs"])
            self.batched = self.metadata["input"]["batched"]
            self.dtype = vars(torch)[self.metadata["input"]["dtype"]]

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name, without the padding of a fixed number of detections.

        Args:
            images: (3, H, W), or (B, 3, H, W) for a batched model, with values from 0 to 255. Other dtypes are cast.

        Raises:
            ConfigError: If the model does not accept the size of the images, or takes uint8 and the images are floating
                point.
        """
        if images.is_floating_point() and not self.dtype.is_floating_point:
            raise ConfigError(f"'{self.path}' accepts only {self.dtype} images. Export it with input_dtype float32.")
        size = self.metadata["input"]["size"]
        if size and list(images.shape[-2:]) != list(size):
            given = " x ".join(map(str, images.shape[-2:]))
            raise ConfigError(f"'{self.path}' accepts only {size[0]} x {size[1]} pixels, not {given}. Resize images.")
        check_sides(self.metadata["input"]["sides"], images.shape[-2:], what=str(self.path))
        with torch.no_grad():
            outputs = dict(zip(self.output_names, self._run(images.to(self.dtype)), strict=True))
        if "count" not in outputs:
            return outputs
        if self.batched:
            return unpad_detections(outputs)
        count = int(outputs.pop("count"))
        return {name: value[:count] for name, value in outputs.items()}

    def run_each(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return the outputs of each image (3, H, W). A batched model takes all images, of one size, in one call."""
        if not self.batched:
            return [self(image) for image in images]
        outputs = self(torch.stack(list(images)))
        index = outputs.pop("image_index")
        return [{name: value[index == i] for name, value in outputs.items()} for i in range(len(images))]

    def as_detectron2(self, batch: Sequence[dict]) -> list[dict[str, Instances]]:
        """Run with the interface of detectron2's models, for its evaluators.

        Args:
            batch: Dicts with ``image`` (3, H, W), and ``height`` and ``width`` of the original image.

        Returns:
            For each image ``{"instances": Instances}``, in pixels of the original image.
        """
        results = []
        for inputs in batch:
            (outputs,) = self.run_each([inputs["image"]])
            height, width = inputs["image"].shape[-2:]
            original = inputs.get("height", height), inputs.get("width", width)
            results.append({"instances": to_instances(outputs, (height, width), original)})
        return results


# -- metadata --------------------------------------------------------------------------------------


def metadata_path(path: str | Path) -> Path:
    """Return the path of the metadata file of an exported file."""
    return Path(f"{path}.metadata.json")


def read_metadata(path: Path) -> dict | None:
    """Return the metadata file next to an exported file, or ``None`` if there is none.

    Raises:
        ConfigError: If the SHA-256 of a file of the model differs.
    """
    file = metadata_path(path)
    if not file.exists():
        return None
    metadata = dict(read_json(file, what=f"metadata of {path}"))
    # A user who edits the model deletes its sha256.
    for name, digest in ({path.name: metadata.get("sha256")} | metadata.get("other_files", {})).items():
        check_file(path.with_name(name), "file", key=f"part of {path}")
        if digest not in (None, content_hash(path.with_name(name))):
            advice = "Export the model again, or delete sha256 from the metadata if you changed the file yourself."
            raise ConfigError(f"The SHA-256 of '{path.with_name(name)}' differs from {file.name}. {advice}")
    return metadata


# -- inputs ----------------------------------------------------------------------------------------


def check_sides(sides: Sequence[int], size: Sequence[int], *, what: str) -> None:
    """Raise a :class:`ConfigError` if a side of an image of ``size`` (height, width) is outside ``sides``.

    Args:
        sides: The smallest and largest side in pixels.
        size: Height and width of the image in pixels.
        what: The image or the argument, for the message.
    """
    if min(size) < sides[0] or max(size) > sides[1]:
        accepted = f"the model accepts sides from {sides[0]} to {sides[1]}"
        raise ConfigError(f"{what}: the image has {size[0]} x {size[1]} pixels, but {accepted}. Resize it.")


def letterbox_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width with the aspect ratio of an image that fit into ``size``."""
    scale = min(size[0] / height, size[1] / width)
    return int(height * scale + 0.5), int(width * scale + 0.5)


def pad_image(image: Tensor, size: tuple[int, int], mean: Sequence[float]) -> Tensor:
    """Pad an image (3, h, w) to (3, *size), at the bottom and on the right, with the rounded ``mean``.

    After normalization the padding is about 0, as in detectron2.
    """
    canvas = torch.tensor(mean).round().to(image.dtype)[:, None, None].repeat(1, *size)
    canvas[:, : image.shape[1], : image.shape[2]] = image
    return canvas


# -- outputs ---------------------------------------------------------------------------------------


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Paste masks into an image.

    Args:
        masks: (N, 1, S, S), the probability of each pixel of a box.
        boxes: (N, 4), XYXY in pixels.
        size: Height and width of the image.

    Returns:
        (N, height, width) bool: whether the probability is at least 0.5.
    """
    # Without any mask, detectron2 returns uint8.
    return paste_masks_in_image(masks[:, 0].float(), boxes.float(), size).bool()


def to_instances(outputs: dict[str, Tensor], size: tuple[int, int], original: tuple[int, int]) -> Instances:
    """Return the outputs of an exported model as detectron2's ``Instances``.

    Args:
        outputs: The outputs by name.
        size: Height and width of the resized image, without padding. Boxes are clipped to it.
        original: Height and width of the original image. Boxes are scaled to it, and masks are pasted into it.
    """
    boxes = Boxes(outputs["boxes"].clone())
    boxes.scale(original[1] / size[1], original[0] / size[0])
    instances = Instances(tuple(original), scores=outputs["scores"], pred_classes=outputs["classes"])
    if "masks" in outputs:
        # Paste before clipping, because a mask covers the whole box.
        instances.pred_masks = paste_masks(outputs["masks"], boxes.tensor, original)
    boxes.clip(original)
    instances.pred_boxes = boxes
    return instances[boxes.nonempty()]
