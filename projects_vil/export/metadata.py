"""The metadata (JSON) next to an exported file, with which one can run the file without this repository."""

import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path

import torchvision
from detectron2.config import CfgNode

from backbones import ConfigError
from backbones.errors import check_file
from projects_vil.checkpoint import Categories, versions
from projects_vil.config import detector_name
from projects_vil.export.formats import FORMATS, OPSET, embedded_metadata
from projects_vil.export.traceable import ExportableDetector
from projects_vil.modeling import LARGEST_BATCH, export_sides
from projects_vil.utils import parse_json, read_json

# What a runner relies on: a set of types, a list of items of these types, or the allowed values.
_SCHEMA: dict[str, set | list | tuple] = {
    **dict.fromkeys(("precision", "detector", "input.name"), {str}),
    **dict.fromkeys(("input.size", "resizing.short_side", "resizing.longest_side"), {type(None), int, list}),
    **dict.fromkeys(("normalization.mean", "normalization.std"), [int, float]),
    "input.batched": {bool},
    "input.dtype": ("uint8", "float32"),
    "input.sides": [int],
    "input.color_order": ("RGB", "BGR"),
    "outputs": [dict],
    "classes": [str],
    "category_ids": [int],
    "thresholds.score": {int, float},
    "thresholds.detections_per_image": {int},
}
_DIGEST = "metadata_sha256"
# What follows from the file, and so is not in it.
_OF_FILE = ("sha256", "other_files", _DIGEST)


def metadata_path(path: str | Path) -> Path:
    """Return the path of the metadata of an exported file."""
    return Path(f"{path}.metadata.json")


def check_sides(sides: Sequence[int], size: Sequence[int], *, what: str) -> None:
    """Raise a :class:`ConfigError` if a model with these sides does not take an image of ``size`` (height, width)."""
    if min(size) < sides[0] or max(size) > sides[1]:
        raise ConfigError(
            f"{what}: {size[0]} x {size[1]} pixels, and the model takes sides of {sides[0]} to {sides[1]}"
        )


def check_input(taken: dict, shape: Sequence[int], *, what: str) -> None:
    """Raise a :class:`ConfigError` where a model does not take images of ``shape``, (3, H, W) or (B, 3, H, W).

    Args:
        taken: ``input`` of its metadata.
    """
    height, width = shape[-2:]
    if taken.get("size") and [height, width] != taken["size"]:
        fixed = f"{taken['size'][0]} x {taken['size'][1]}"
        raise ConfigError(f"{what}: {height} x {width} pixels, and the model takes {fixed} only: scale and pad to that")
    check_sides(taken["sides"], (height, width), what=what)
    least, most = taken.get("batch") or (1, shape[0])
    if taken["batched"] and not least <= shape[0] <= most:
        raise ConfigError(f"{what}: a batch of {shape[0]} images, and the model takes {least} to {most}")


def digests_of(path: Path, file_format: str) -> dict:
    """Return the SHA-256 of a model's file, and, by name, of the files that belong to it, as in its metadata."""
    own, *others = FORMATS[file_format].files(path)
    return {"sha256": digest_of(own), "other_files": {file.name: digest_of(file) for file in others}}


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read_metadata(path: str | Path) -> dict:
    """Return the metadata of an exported file: those next to it, or else those in it.

    Raises:
        ConfigError: where they are missing or not those of an exported model, or where they or the file have changed.
    """
    path, file = Path(path), metadata_path(path)
    check_file(path, "file")
    metadata = None
    if file.exists():
        try:
            metadata = _checked(read_json(file, what=f"metadata of {path}"), file)
        except ConfigError as error:
            if embedded_metadata(path) is None:
                raise
            raise ConfigError(f"{error}; or remove it, since {path.name} has its own") from error
        check_digest(path, metadata)
    embedded = embedded_metadata(path)
    if metadata is None and embedded is None:
        check_file(file, "file", key=f"the metadata of {path}")
    inside = None if embedded is None else _checked(parse_json(embedded, source=path), path)
    if metadata is None:
        metadata, file = inside, path
    # The digest may have been removed on purpose.
    digest = metadata.get(_DIGEST)
    known = inside.get(_DIGEST) if inside is not None else digest
    if digest is not None and not digest == known == with_digest(metadata)[_DIGEST]:
        raise ConfigError(
            f"{file} is not the metadata that {path.name} was exported with: restore or remove it (the file has its "
            f"own); if you have changed it on purpose, remove {_DIGEST} there"
        )
    # Names may be changed on purpose, their number may not.
    given, own = len(metadata["classes"]), len((inside or metadata)["classes"])
    if given != own:
        raise ConfigError(f"{file} has {given} classes, and {path.name} has {own}: restore or remove {file.name}")
    return metadata


def with_digest(metadata: dict) -> dict:
    """Return metadata with a SHA-256 of all that does not follow from the file."""
    kept = json.dumps({key: value for key, value in metadata.items() if key not in _OF_FILE}, sort_keys=True)
    return json.loads(json.dumps(metadata)) | {_DIGEST: hashlib.sha256(kept.encode()).hexdigest()}


def _checked(metadata: object, file: Path) -> dict:
    wrong = [key for key, kind in _SCHEMA.items() if not _fits(_entry(metadata, key), kind)]
    if not wrong:
        ids, names = metadata["category_ids"], [output.get("name") for output in metadata["outputs"]]
        wrong += ["category_ids"] * (not len(set(ids)) == len(ids) == len(metadata["classes"]))
        wrong += ["outputs"] * (names[:3] != ["boxes", "scores", "classes"])
    if wrong:
        raise ConfigError(f"{file} is not the metadata of an exported model, see {wrong[0]}: export it again")
    return metadata


def _entry(table: object, key: str) -> object:
    for name in key.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table


def _fits(value: object, kind: set | list | tuple) -> bool:
    if isinstance(kind, list):
        return type(value) is list and bool(value) and all(type(item) in kind for item in value)
    return value in kind if isinstance(kind, tuple) else type(value) in kind


def check_digest(path: str | Path, metadata: dict) -> None:
    """Raise a :class:`ConfigError` where an exported file, or one that belongs to it, is not that of its metadata."""
    # sha256 may have been removed on purpose.
    digests = {Path(path).name: metadata.get("sha256")} | metadata.get("other_files", {})
    for name, digest in digests.items():
        file = Path(path).with_name(name)
        check_file(file, "file", key=f"which belongs to {path}")
        if digest not in (None, digest_of(file)):
            raise ConfigError(
                f"{file} is damaged, or not the file that {metadata_path(path).name} was written for (its sha256 "
                "differs): export it again; if you have changed it on purpose, remove sha256 there"
            )


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
    """Return all that is needed to run an exported model without this repository, for JSON.

    Args:
        cfg: the detector's config.
        exportable: the exported detector.
        categories: the model's classes.
        file_format: a key of ``FORMATS``.
        precision: precision of the weights.
        input_dtype: type of the input images.
        weights: the checkpoint.
        opset: that of ONNX; None for the usual one.

    Raises:
        ConfigError: for an ``exportable.size`` that the detector or the format does not take.
    """
    entry = FORMATS[file_format]
    shortest, longest = export_sides(exportable.detector)
    sides = [entry.shortest_side or shortest, longest]
    if exportable.size:
        check_sides(sides, exportable.size, what="size")
    short, longest = 0 if exportable.size else cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    heads = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.ROI_HEADS
    backbone = getattr(getattr(exportable.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME)
    thresholds = {
        "score": heads.SCORE_THRESH_TEST,
        "nms": heads.NMS_THRESH_TEST,
        "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
    }
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
        # The head doubles the size of the pooled features.
        "outputs": _describe_outputs(exportable, 2 * cfg.MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION),
        "fixed_detections": exportable.fixed_number,
        "classes": list(categories.names),
        "category_ids": list(categories.ids),
        "thresholds": thresholds | ({"mask": 0.5} if "masks" in exportable.output_names else {}),
        "weights": Path(weights).name,
        "versions": versions()
        | {"torchvision": torchvision.__version__}
        | {name: importlib.metadata.version(name) for name in entry.packages},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


_RULE = (
    "the shorter side becomes short_side, the longer is multiplied by short_side / shorter; if it is more than "
    "longest_side then, both are multiplied by longest_side / longer; each is int(side + 0.5); null: images are taken "
    "as they are"
)
_FIXED_RULE = (
    "both sides are multiplied by the smaller of input.size[0] / height and input.size[1] / width, each is "
    "int(side + 0.5); then the rounded mean is added below and on the right up to input.size; boxes are cut at the "
    "end of the image"
)
_MASKS = "probability that a pixel of the box is of the object: resize it to the box, then compare"
_COUNT = "how many rows of the other outputs, from the first, are detections; the rest is zero"


def _describe_outputs(exportable: ExportableDetector, mask_side: int) -> list[dict]:
    images = ["batch"] if exportable.batched else []
    rows = ["detections"] if exportable.fixed_number is None else [*images, exportable.fixed_number]
    known = {
        "boxes": ([*rows, 4], "float32", "left, top, right, bottom in pixels of the input image"),
        "scores": (rows, "float32", "probability, from the highest"),
        "classes": (rows, "int64", "index into the list of classes"),
        "masks": ([*rows, 1, mask_side, mask_side], "float32", _MASKS),
        "image_index": (rows, "int64", "which image of the batch it is in"),
        "count": (images or [1], "int64", _COUNT),
    }
    keys = ("name", "shape", "dtype", "meaning")
    return [dict(zip(keys, (name, *known[name]), strict=True)) for name in exportable.output_names]
