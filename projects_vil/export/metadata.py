"""The metadata of an exported file: what a program needs to run it without this repository."""

import datetime
from collections.abc import Sequence
from pathlib import Path

import torchvision
from detectron2.config import CfgNode

from backbones import ConfigError
from backbones.errors import check_file, package_version
from projects_vil.checkpoint import versions
from projects_vil.config import detector_name, head_of
from projects_vil.data import Categories
from projects_vil.export.formats import FORMATS, OPSET
from projects_vil.export.traceable import ExportableDetector
from projects_vil.files import content_hash, read_json
from projects_vil.modeling import LARGEST_BATCH, export_sides

# The problem and the advice for ``explained_errors``
DAMAGED = ("has damaged metadata", "Export the model again.")


def metadata_path(path: str | Path) -> Path:
    """Return the path of the metadata file of an exported file."""
    return Path(f"{path}.metadata.json")


# -- reading ---------------------------------------------------------------------------------------


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
            raise ConfigError(
                f"The SHA-256 of '{path.with_name(name)}' differs from {file.name}. Export the model again, or delete "
                "sha256 from the metadata if you changed the file yourself."
            )
    return metadata


def check_sides(sides: Sequence[int], size: Sequence[int], *, what: str) -> None:
    """Raise a :class:`ConfigError` if a side of an image of ``size`` (height, width) is outside ``sides``.

    Args:
        sides: The smallest and largest side in pixels.
        size: Height and width of the image in pixels.
        what: The image or the argument, for the message.
    """
    if min(size) < sides[0] or max(size) > sides[1]:
        raise ConfigError(
            f"{what}: the image has {size[0]} x {size[1]} pixels, but the model accepts sides from {sides[0]} to "
            f"{sides[1]}. Resize it."
        )


# -- writing ---------------------------------------------------------------------------------------


def describe_model(
    cfg: CfgNode,
    exportable: ExportableDetector,
    categories: Categories,
    file_format: str,
    *,
    precision: str,
    input_dtype: str,
    weights: str | Path,
    opset: int | None = None,
) -> dict:
    """Return the metadata of an exported detector, for JSON.

    Args:
        cfg: The config of the detector.
        exportable: The exported detector.
        categories: The classes of the model.
        file_format: A key of ``FORMATS``.
        precision: The precision of the weights.
        input_dtype: The dtype of the input images.
        weights: The path of the checkpoint.
        opset: The opset of an ONNX file; ``None`` for ``OPSET``.

    Raises:
        ConfigError: If the detector or the format does not accept ``exportable.size``.
    """
    entry = FORMATS[file_format]
    shortest, longest = export_sides(exportable.detector)
    sides = [entry.shortest_side or shortest, longest]
    if exportable.size:
        check_sides(sides, exportable.size, what="size")
    short, longest = 0 if exportable.size else cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    backbone = getattr(getattr(exportable.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
    head, number = cfg.MODEL[head_of(cfg)], cfg.TEST.DETECTIONS_PER_IMAGE
    thresholds = {"score": head.SCORE_THRESH_TEST, "nms": head.NMS_THRESH_TEST, "detections_per_image": number}
    return {
        "metadata_version": 1,
        "format": file_format,
        "opset": (opset or OPSET) if file_format == "onnx" else None,
        "precision": precision,
        "runtime_options": dict(entry.options),
        "detector": detector_name(cfg),
        "backbone": backbone,
        "input": {
            "name": exportable.input_names[0],
            "shape": [*(["batch"] if exportable.batched else []), 3, *(exportable.size or ("height", "width"))],
            "size": exportable.size and list(exportable.size),
            "batched": exportable.batched,
            "dtype": input_dtype,
            "range": [0, 255],
            "stride": exportable.detector.backbone.size_divisibility,
            "sides": sorted(exportable.size or sides),
            "batch": [1, LARGEST_BATCH] if exportable.batched else None,
            "color_order": cfg.INPUT.FORMAT,
        },
        "resizing": {
            "short_side": short or None,
            "longest_side": longest if short else None,
            "interpolation": "bilinear, antialiased (Pillow's BILINEAR)",
            "rule": _FIXED_RULE if exportable.size else _RULE,
        },
        "normalization": {
            "inside_the_model": True,
            "mean": list(cfg.MODEL.PIXEL_MEAN),
            "std": list(cfg.MODEL.PIXEL_STD),
        },
        # The mask head upsamples the pooled features by 2.
        "outputs": _describe_outputs(exportable, 2 * cfg.MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION),
        "fixed_detections": exportable.fixed_number,
        "classes": list(categories.names),
        "category_ids": list(categories.ids),
        "thresholds": thresholds | ({"mask": 0.5} if "masks" in exportable.output_names else {}),
        "weights": Path(weights).name,
        "versions": versions()
        | {"torchvision": torchvision.__version__}
        | {name: package_version(name, f"{name}-gpu") for name in entry.packages},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


_RULE = (
    "the shorter side becomes short_side, and the longer side is multiplied by short_side / shorter side. If it then "
    "exceeds longest_side, both sides are multiplied by longest_side / longer side. Each side is int(side + 0.5). "
    "null: images are not resized."
)
_FIXED_RULE = (
    "both sides are multiplied by min(input.size[0] / height, input.size[1] / width), and each is int(side + 0.5). "
    "Then the image is padded to input.size at the bottom and on the right with the rounded mean. Clip boxes to the "
    "unpadded image."
)
_MASKS = "probability that a pixel of the box belongs to the object: resize to the box, then threshold"
_COUNT = "number of detections: the first rows of the other outputs. All other rows are zero."


def _describe_outputs(exportable: ExportableDetector, mask_side: int) -> list[dict]:
    images = ["batch"] if exportable.batched else []
    rows = ["detections"] if exportable.fixed_number is None else [*images, exportable.fixed_number]
    descriptions = {
        "boxes": ([*rows, 4], "float32", "left, top, right, bottom in pixels of the input image"),
        "scores": (rows, "float32", "probability, highest first"),
        "classes": (rows, "int64", "index into classes"),
        "masks": ([*rows, 1, mask_side, mask_side], "float32", _MASKS),
        "image_index": (rows, "int64", "index of the image in the batch"),
        "count": (images or [1], "int64", _COUNT),
    }
    keys = ("name", "shape", "dtype", "meaning")
    return [dict(zip(keys, (name, *descriptions[name]), strict=True)) for name in exportable.output_names]
