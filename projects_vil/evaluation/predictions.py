"""Evaluate Parquet files of predictions, without the model."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.evaluation import print_csv_format
from detectron2.utils import comm

from backbones import ConfigError
from backbones.errors import check_file, check_packages, explained_errors
from projects_vil.data import catalog
from projects_vil.data.records import SHARED, ground_truth, read_and_share
from projects_vil.data.segmentation import check_segmentation
from projects_vil.evaluation.evaluators import COCOEvaluator
from projects_vil.evaluation.results import check_finite, write_results
from projects_vil.utils import log_run


def evaluate_predictions(cfg: CfgNode, paths: Sequence[str | Path]) -> None:
    """Evaluate Parquet files of ``vil predict`` on the COCO dataset in ``DATASETS.TEST``.

    Classes are matched by name, or else by index. If the number of classes differs, classes with other names are
    ignored. A row belongs to an image if one of their file names ends with the other. Rows of other images are ignored.
    An image without a row, or with an error row, counts as an image without detections.

    Args:
        cfg: A config with one test dataset.
        paths: Parquet files, or folders of Parquet files.

    Raises:
        ConfigError: If pyarrow is missing, a file is damaged, a box or score is not finite, a row matches several
            images, an image has several rows, or no image or class has predictions.
        OSError: If a file cannot be read.
    """
    check_packages("The evaluation of predictions", "pyarrow")
    catalog.register_datasets(cfg)
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    (name,) = cfg.DATASETS.TEST
    catalog.check_files(name)
    folder, limit, check = str(Path(cfg.OUTPUT_DIR) / "inference"), cfg.TEST.DETECTIONS_PER_IMAGE, cfg.DATASETS.CHECK
    SHARED.clear()
    read_and_share(lambda: len(ground_truth(name, check=check, masks=True) or ()), [name])
    categories, matches = catalog.categories_of(name), {}
    evaluator = COCOEvaluator(name, output_dir=folder, max_dets_per_image=limit, masks=True, check=check)
    evaluator.reset()
    named: dict[str, list[dict[str, Any]]] = {}
    missing = {image["id"]: image for image, _ in evaluator.truth}
    total, others, errors = len(missing), 0, 0
    segmented = [bool(one.get("segmentation")) for _, objects in evaluator.truth for one in objects or ()]
    has_masks = all(segmented)
    if any(segmented) and not has_masks:
        text = "Evaluating boxes only: %d of %d annotations have no segmentation."
        logging.getLogger(__name__).warning(text, segmented.count(False), len(segmented))
    for image in missing.values():
        named.setdefault(Path(image["file_name"]).name, []).append(image)
    for file, labels, row, is_mine in _rows(paths):
        path = f"/{row['file_name']}"
        own = [(one, f"/{one['file_name']}") for one in named.get(Path(path).name, ())]
        own = [one for one, other in own if path.endswith(other) or other.endswith(path)]
        if labels not in matches:
            matches[labels] = _match(name, categories, file, labels)
        if len(own) > 1 or any(one["id"] not in missing for one in own):
            advice = "Predict on the dataset's folder."
            raise ConfigError(f"'{path[1:]}' in '{file}' matches several images of {name}. {advice}")
        for image in own:
            del missing[image["id"]]
            if is_mine:
                row["masks"] = row["masks"] if has_masks else None
                with explained_errors(file, "is damaged, or not from 'vil predict'", "Predict again."):
                    check_finite(row["boxes"], row["scores"], source=f"{file}, {path[1:]}")
                    detections = _results(row, image, matches[labels])
                evaluator.add(image["id"], detections)
        others, errors = others + (not own), errors + bool(own and row["error"])
    if len(missing) == total:
        raise ConfigError(f"No row of the predictions ({others}) is for an image of {name}. Compare the file names.")
    text = "%d images of %s: %d without a prediction, %d with an error; %d rows of other images"
    logging.getLogger(__name__).info(text, total, name, len(missing), errors, others)
    results = evaluator.evaluate()
    if comm.is_main_process():
        print_csv_format(results)
        write_results(cfg, results)


_COLUMNS = ["file_name", "error", "height", "width", "boxes", "scores", "category_ids", "masks"]
Labels = tuple[tuple[int, str], ...]  # category ids and names


def _match(name: str, categories: Mapping[int, str], file: Path, labels: Labels) -> dict[int, int | None]:
    """Return a mapping from the category ids of a file to the category ids of the dataset, or to None."""
    ours, theirs = [label for _, label in labels], list(categories.values())
    differ = f"{file} has {catalog.describe_classes(ours)}, and {name} has {catalog.describe_classes(theirs)}"
    matched = catalog.match_classes(ours, theirs) if len(ours) != len(theirs) else {}
    matched = matched or dict(enumerate(catalog.match_all_classes(ours, theirs, differ=differ)))
    ids = list(categories)
    return {number: ids[matched[index]] if index in matched else None for index, (number, _) in enumerate(labels)}


def _rows(paths: Sequence[str | Path]) -> Iterator[tuple[Path, Labels, dict[str, Any], bool]]:
    """Yield each row with its file, the classes of the file, and whether this process evaluates the row.

    The processes of a run share the rows in turns of 64. The other rows have only a name and an error.
    """
    from pyarrow.parquet import ParquetFile  # an optional dependency

    turns = cycle(range(comm.get_world_size()))
    for file in chain(*(sorted(path.glob("*.parquet")) if path.is_dir() else [path] for path in map(Path, paths))):
        check_file(file, "Parquet file")
        with explained_errors(file, "is damaged, or not from 'vil predict'", "Predict again."):
            table = ParquetFile(file)
            labels = tuple((one["id"], one["name"]) for one in json.loads(table.schema_arrow.metadata[b"categories"]))
            for batch in table.iter_batches(batch_size=64):
                is_mine = next(turns) == comm.get_rank()
                rows = batch.select(_COLUMNS if is_mine else ["file_name", "error"]).to_pylist()
                yield from ((file, labels, row, is_mine) for row in rows)


def _results(row: dict[str, Any], image: dict[str, Any], ids: dict[int, int | None]) -> list[dict[str, Any]]:
    """Return a row in COCO's results format. ``ids`` maps category ids of the row to category ids of the dataset."""
    size, expected = [row["height"], row["width"]], [image["height"], image["width"]]
    if size != expected and not row["error"]:
        differs = f"has {size} pixels, but {expected} in the annotations"
        raise ConfigError(f"'{row['file_name']}' {differs}. Use the same images.")
    boxes = np.array(row["boxes"], np.float32).reshape(-1, 4)
    boxes[:, 2:] -= boxes[:, :2]
    masks = [{"segmentation": {"size": size, "counts": bytes.decode(one)}} for one in row["masks"] or ()]
    if not all(check_segmentation(one["segmentation"], *size)[1] for one in masks):
        raise ValueError("invalid RLE")  # pycocotools would crash
    columns = zip(boxes.tolist(), row["scores"], row["category_ids"], masks or [{}] * len(boxes), strict=True)
    return [
        {"image_id": image["id"], "category_id": ids[label], "bbox": box, "score": score} | mask
        for box, score, label, mask in columns
        if ids[label] is not None
    ]
