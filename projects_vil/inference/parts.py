"""Detections as Parquet: a row an image, in part files of a fixed number of images."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backbones import ConfigError
from projects_vil.checkpoint import Categories
from projects_vil.inference.sources import Loaded, Skipped

try:
    import pyarrow as pa
except ImportError as missing:
    raise ConfigError("Parquet needs pyarrow: pip install 'vil-detectron2[scale]'") from missing

if TYPE_CHECKING:
    from projects_vil.inference.detector import Detections

# Boxes are left, top, right, bottom in pixels of the upright image, scores descend, and masks are the counts of COCO's
# compressed RLE of size (height, width), null for a detector without masks. A row with an error has no objects.
SCHEMA = pa.schema(
    {
        "file_name": pa.string(),
        "height": pa.int32(),
        "width": pa.int32(),
        "boxes": pa.list_(pa.list_(pa.float32(), 4)),
        "scores": pa.list_(pa.float32()),
        "category_ids": pa.list_(pa.int32()),
        "masks": pa.list_(pa.binary()),
        "error": pa.string(),
    }
)


def row_of(item: Loaded | Skipped, detections: "Detections | None") -> dict[str, Any]:
    """Return the row of one image, with the columns of ``SCHEMA``, from a pair that ``Detector.detect`` yields."""
    if isinstance(item, Skipped):
        row = dict.fromkeys(SCHEMA.names) | {"boxes": [], "scores": [], "category_ids": []}
        return row | {"file_name": _text(item.name), "error": item.reason}
    has_masks = detections.instances.has("pred_masks")
    return {
        "file_name": _text(item.entry["file_name"]),
        "height": item.entry["height"],
        "width": item.entry["width"],
        "boxes": detections.boxes.tolist(),
        "scores": detections.scores.tolist(),
        "category_ids": [detections.categories.ids[index] for index in detections.classes.tolist()],
        "masks": [one["segmentation"]["counts"].encode() for one in detections.to_coco(0)] if has_masks else None,
        "error": None,
    }


def table_of(rows: Sequence[dict[str, Any]], categories: Categories) -> pa.Table:
    """Return rows as a table of ``SCHEMA``, whose metadata has the ``categories`` as COCO's list, in JSON."""
    listed = [{"id": number, "name": name} for number, name in zip(categories.ids, categories.names, strict=True)]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({"categories": json.dumps(listed)}))


def _text(name: str) -> str:
    """Return a file's name with what is not UTF-8 as ``\\udc80`` and the like, since Parquet's strings are UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()
