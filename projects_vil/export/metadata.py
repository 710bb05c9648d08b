"""What is said of an exported file in the JSON beside it."""

import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torchvision  # noqa: F401  its operators are in every exported detector
from detectron2.config import CfgNode
from torch import nn

from backbones import InputError
from backbones.utils.errors import check_file
from projects_vil.checkpoint import versions
from projects_vil.config import detector_name
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats import FORMATS, OPSET
from projects_vil.modeling import largest_side


def sides_of(detector: nn.Module, file_format: str, size: tuple[int, int] | None = None) -> list[int]:
    """The shortest and the longest side, in pixels, of an image that a file takes."""
    shortest, longest = FORMATS[file_format].sides
    sides = [shortest, min(longest, largest_side(detector))]
    if size is None:
        return sides
    check_sides(sides, size, what="--size")
    return sorted(size)


def check_sides(sides: Sequence[int], size: Sequence[int], *, what: str) -> None:
    """Raise an :class:`InputError` where an image of ``size`` (height, width) is not for a model with these sides."""
    if min(size) < sides[0] or max(size) > sides[1]:
        raise InputError(f"{what}: {size[0]} x {size[1]} pixels, and the model takes sides of {sides[0]} to {sides[1]}")


def check_batch(metadata: dict, number: int, *, what: str) -> None:
    """Raise an :class:`InputError` where a batch of ``number`` images is not for a model with these metadata."""
    # Files that were exported before this was written do not say it.
    least, most = metadata["input"].get("batch") or (1, number)
    if not least <= number <= most:
        raise InputError(f"{what}: a batch of {number} images, and the model takes {least} to {most}")


def check_input(taken: dict, size: Sequence[int], *, what: str) -> None:
    """Raise an :class:`InputError` where metadata tell of other images than those of ``size`` (height, width)."""
    fixed = taken.get("size")
    if fixed and list(size) != fixed:
        own = f"{fixed[0]} x {fixed[1]}"
        raise InputError(
            f"{what}: {size[0]} x {size[1]} pixels, and the model takes {own} alone: scale and pad to that"
        )
    check_sides(taken["sides"], size, what=what)


def metadata_path(path: str | Path) -> Path:
    """Where the metadata of an exported file stands."""
    return Path(f"{path}.metadata.json")


def digests_of(path: Path, file_format: str) -> dict:
    """SHA-256 of a model's file, and, by name, of those that belong to it, as its metadata have them."""
    own, *beside = FORMATS[file_format].files(path)
    return {"sha256": digest_of(own), "beside": {file.name: digest_of(file) for file in beside}}


def digest_of(path: str | Path) -> str:
    """SHA-256 of a file, as metadata have it."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def read_metadata(path: str | Path) -> dict:
    """The metadata of an exported file.

    Raises:
        InputError: where they are missing or are no such thing.
    """
    beside = metadata_path(path)
    check_file(path, "file")
    try:
        metadata = json.loads(beside.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {beside} ({error.strerror}): an exported model needs it beside it") from error
    except ValueError as error:
        raise InputError(f"{beside} is not JSON: {error}") from error
    if not _is_metadata(metadata):
        raise InputError(f"{beside} is not the metadata of an exported model")
    return metadata


def check_digest(path: str | Path, metadata: dict) -> None:
    """Raise an :class:`InputError` where an exported file, or one that belongs to it, is not that of its metadata."""
    # Files that were exported before this was written have none.
    digests = {Path(path).name: metadata.get("sha256")} | metadata.get("beside", {})
    for name, digest in digests.items():
        file = Path(path).with_name(name)
        check_file(file, "file", named_by=f"which belongs to {path}")
        if digest not in (None, digest_of(file)):
            raise InputError(
                f"{file} is damaged, or not the file that {metadata_path(path).name} was written for (its sha256 is "
                "another): export it again; where you have changed it, take sha256 out there"
            )


def check_machine(path: str | Path, metadata: dict, here: Mapping[str, str]) -> None:
    """Raise an :class:`InputError` where an exported file was built for another machine than there is ``here``."""
    # Files that were exported before this was written do not say it.
    built_for = metadata.get("built_for") or here
    if built_for != here:
        theirs, ours = (", ".join(map(" ".join, machine.items())) for machine in (built_for, here))
        raise InputError(f"{path} was built for {theirs}, and here is {ours}: export it again here")


def _is_metadata(metadata: object) -> bool:
    if not isinstance(metadata, dict) or not {"input", "outputs", "classes", "resizing"} <= metadata.keys():
        return False
    taken, given, resizing = metadata["input"], metadata["outputs"], metadata["resizing"]
    built_for = metadata.get("built_for", {})
    return (
        isinstance(built_for, dict)
        and all(isinstance(said, str) for said in built_for.values())
        and isinstance(taken, dict)
        and {"batched", "dtype", "color_order", "sides"} <= taken.keys()
        and isinstance(resizing, dict)
        and {"short_side", "longest_side"} <= resizing.keys()
        and isinstance(given, list)
        and all(isinstance(output, dict) and "name" in output for output in given)
    )


def describe_model(
    cfg: CfgNode,
    exportable: ExportableDetector,
    *,
    classes: Sequence[str],
    file_format: str,
    precision: str,
    input_dtype: str,
    weights: str | Path,
    category_ids: Sequence[int] | None = None,
) -> dict:
    """All that someone without this repository must know to feed an exported model, for JSON.

    Args:
        cfg: the detector's config.
        exportable: what is exported.
        classes: their names, in the order of the model's.
        file_format: a key of ``FORMATS``.
        precision: of the weights.
        input_dtype: of the images.
        weights: the checkpoint.
        category_ids: of the classes in COCO files, in the same order; None where they are not known.
    """
    batch = ["images"] if exportable.batched else []
    short, longest = 0 if exportable.size else cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    outputs = [{"name": name} | _OUTPUTS[name] for name in exportable.output_names]
    for output in outputs:
        if output["name"] == "masks":
            # The head doubles what is pooled.
            output["shape"] = ["detections", 1, *[2 * cfg.MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION] * 2]
        if output["name"] == "count":
            output["shape"] = batch or [1]
        elif exportable.fixed_number is not None:
            output["shape"] = [*batch, exportable.fixed_number, *output["shape"][1:]]
    return {
        "metadata_version": 1,
        "format": file_format,
        "opset": OPSET if file_format == "onnx" else None,
        "precision": precision,
        "runtime_options": dict(FORMATS[file_format].options),
        "built_for": FORMATS[file_format].built_for(),
        "detector": detector_name(cfg),
        "backbone": getattr(
            getattr(exportable.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME
        ),
        "input": {
            "name": exportable.input_names[0],
            "shape": [*batch, 3, *(exportable.size or ("height", "width"))],
            "size": exportable.size and list(exportable.size),
            "batched": exportable.batched,
            "dtype": input_dtype,
            "range": [0, 255],
            "sides": sides_of(exportable.detector, file_format, exportable.size),
            "batch": [1, FORMATS[file_format].largest_batch] if exportable.batched else None,
            "color_order": cfg.INPUT.FORMAT,
        },
        "resizing": {
            "short_side": short or None,
            "longest_side": longest if short else None,
            "interpolation": "bilinear, antialiased (Pillow's BILINEAR)",
            "rule": _FIXED_RULE
            if exportable.size
            else "the shorter side becomes short_side, the longer is multiplied by short_side / shorter; if it is "
            "more than longest_side then, both are multiplied by longest_side / longer; each is int(side + 0.5); "
            "null: images are taken as they are",
        },
        "normalization": {
            "inside_the_model": True,
            "mean": list(cfg.MODEL.PIXEL_MEAN),
            "std": list(cfg.MODEL.PIXEL_STD),
        },
        "outputs": outputs,
        "fixed_detections": exportable.fixed_number,
        "classes": list(classes),
        "category_ids": None if category_ids is None else list(category_ids),
        "thresholds": _thresholds(cfg) | ({"mask": 0.5} if "masks" in exportable.output_names else {}),
        "weights": Path(weights).name,
        "versions": versions() | {"torchvision": torchvision.__version__} | _runtime_versions(file_format),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


_FIXED_RULE = (
    "both sides are multiplied by the smaller of input.size[0] / height and input.size[1] / width, each is "
    "int(side + 0.5); then the rounded mean is added below and on the right up to input.size; boxes are cut at the "
    "end of the image"
)

_OUTPUTS = {
    "boxes": {
        "shape": ["detections", 4],
        "dtype": "float32",
        "meaning": "left, top, right, bottom in pixels of the input image",
    },
    "scores": {"shape": ["detections"], "dtype": "float32", "meaning": "probability, from the highest"},
    "classes": {"shape": ["detections"], "dtype": "int64", "meaning": "index into the list of classes"},
    "masks": {
        "shape": ["detections", 1, 28, 28],
        "dtype": "float32",
        "meaning": "probability that a place of the box is of the object: resize it to the box, then compare",
    },
    "image_index": {"shape": ["detections"], "dtype": "int64", "meaning": "which image of the batch it is in"},
    "count": {
        "shape": ["images"],
        "dtype": "int64",
        "meaning": "how many rows of the other outputs, from the first, are detections; the rest is zero",
    },
}


def _thresholds(cfg: CfgNode) -> dict[str, float | int]:
    node = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.ROI_HEADS
    return {
        "score": node.SCORE_THRESH_TEST,
        "nms": node.NMS_THRESH_TEST,
        "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
    }


def _runtime_versions(file_format: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in FORMATS[file_format].packages}
