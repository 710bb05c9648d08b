"""Predictions beside ground truth in one PNG, and the lines that say what a training run reached."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data import DatasetCatalog, MetadataCatalog

from backbones.utils.errors import InputError, closest
from projects_vil.data import IGNORED_LABEL, label_reader, read_image
from projects_vil.visualization.drawing import draw_instances, draw_labels, write_image
from projects_vil.visualization.panels import GAP, PANEL_HEIGHT, PANEL_WIDTH, panel_below_title, stack_rows

MAX_IMAGES = 32


def draw_results(
    dataset_name: str,
    predictions_file: str | Path,
    output_png: str | Path,
    *,
    num_images: int = 8,
    score_threshold: float = 0.5,
) -> int:
    """Draw a contact sheet: a row for each image, ground truth on the left, predictions on the right.

    The images are spread evenly over the dataset and enlarged or reduced to one panel size.

    Args:
        dataset_name: a name in detectron2's DatasetCatalog.
        predictions_file: the ``coco_instances_results.json`` that COCOEvaluator wrote for that dataset, or the
            ``sem_seg_predictions.json`` of SemSegEvaluator.
        output_png: the PNG to write; its folder is created.
        num_images: rows, 1 to 32; all images where the dataset has fewer.
        score_threshold: predictions below it are left out, in [0, 1]; segmentation has none.

    Returns the number of images in the dataset.

    Raises:
        InputError: a value out of range, an unknown dataset, or files that cannot be read or do not belong
            together.
    """
    _check_options(num_images, score_threshold)
    records = _dataset_records(dataset_name)
    metadata = MetadataCatalog.get(dataset_name)
    chosen = [records[i] for i in np.unique(np.linspace(0, len(records) - 1, num_images).round().astype(int))]
    if metadata.get("evaluator_type") == "sem_seg":
        segments = _read_segments(Path(predictions_file), dataset_name, records, metadata)
        read = label_reader(dataset_name)
        rows = [_draw_label_row(record, read, segments[record["file_name"]], metadata) for record in chosen]
    else:
        predictions = _read_predictions(Path(predictions_file), dataset_name, records, metadata)
        rows = []
        for record in chosen:
            kept = [item for item in predictions[record["image_id"]] if item["score"] >= score_threshold]
            rows.append(_draw_row(record, kept, metadata, score_threshold))
    write_image(Path(output_png), stack_rows(rows, title=f"{dataset_name}: {len(rows)} of {len(records)} images"))
    return len(records)


def predictions_file(run: Path, dataset_name: str) -> Path:
    """Where a run has its predictions: a folder for each test set where it has several."""
    metadata = MetadataCatalog.get(dataset_name) if dataset_name in DatasetCatalog.list() else None
    is_sem_seg = metadata is not None and metadata.get("evaluator_type") == "sem_seg"
    name = "sem_seg_predictions.json" if is_sem_seg else "coco_instances_results.json"
    own = run / "inference" / dataset_name / name
    return own if own.exists() else run / "inference" / name


def summarize_run(run: str | Path, dataset_name: str, *, num_images: int, drawing: str | Path) -> list[str]:
    """The last lines of a run: average precision or mIoU on ``dataset_name``, and the files that hold the results.

    Args:
        run: output folder of ``tools/train_net.py``, with ``evaluation.json``.
        num_images: images in the dataset.
        drawing: the PNG that ``draw_results`` wrote.

    Raises:
        InputError: ``evaluation.json`` is missing, is not JSON or has no figures for the dataset.
    """
    run = Path(run)
    evaluation_file = run / "evaluation.json"
    evaluation = _read_json(evaluation_file, hint="evaluate the run with tools/train_net.py --eval-only")
    box, mask = (_metric(evaluation, dataset_name, task, "AP") for task in ("bbox", "segm"))
    miou = _metric(evaluation, dataset_name, "sem_seg", "mIoU")
    if box is None and miou is None:
        raise InputError(f"{evaluation_file} has no box AP and no mIoU for {dataset_name!r}; evaluate the run on it")
    named = {"box AP": box, "mask AP": mask, "mIoU": miou}
    figures = "   ".join(f"{name} {value:.1f}" for name, value in named.items() if value is not None)
    return [
        f"{figures}   ({dataset_name}, {num_images} images)",
        f"results in {run}: {', '.join(_result_names(run, Path(drawing)))}",
    ]


def _metric(evaluation: dict, dataset_name: str, task: str, name: str) -> float | None:
    try:
        return float(evaluation[dataset_name][task][name])
    except (LookupError, TypeError, ValueError):
        return None


def _result_names(run: Path, drawing: Path) -> list[str]:
    weights = run / "model_final.pth"
    if not weights.exists():
        weights = max(run.glob("model_*.pth"), default=weights)
    names = [path.name for path in (weights, run / "evaluation.json") if path.exists()]
    if (run / "export").is_dir():
        names.append("export/")
    return [*names, drawing.name if drawing.parent == run else str(drawing)]


# -- reading ---------------------------------------------------------------------------------------


def _check_options(num_images: int, score_threshold: float) -> None:
    if not 1 <= num_images <= MAX_IMAGES:
        raise InputError(f"--num-images is {num_images}; it must be 1 to {MAX_IMAGES}")
    if not 0 <= score_threshold <= 1:
        raise InputError(f"--score-threshold is {score_threshold}; it must be 0 to 1")


def _dataset_records(dataset_name: str) -> list[dict]:
    known = DatasetCatalog.list()
    if dataset_name not in known:
        raise InputError(f"dataset {dataset_name!r} is not registered{closest(dataset_name, known)}")
    try:
        records = DatasetCatalog.get(dataset_name)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the annotations of dataset {dataset_name!r}: {error}") from error
    if not records:
        raise InputError(f"dataset {dataset_name!r} has no images")
    return records


def _read_json(path: Path, *, hint: str):
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}); {hint}") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); {hint}") from error


def _read_predictions(path: Path, dataset_name: str, records: list[dict], metadata) -> dict[int, list[dict]]:
    """Predictions by image id, with ``category_id`` mapped to the contiguous class index."""
    hint = f"evaluate the model on {dataset_name!r} to write it"
    content = _read_json(path, hint=hint)
    class_indices = _class_indices(metadata)
    sizes = {record["image_id"]: [record["height"], record["width"]] for record in records}
    predictions = defaultdict(list)
    for result in content if isinstance(content, list) else [content]:
        if not _is_coco_result(result):
            raise InputError(f"{path} is no list of COCO results; {hint}")
        image_id, category_id, mask = result["image_id"], result["category_id"], result.get("segmentation")
        size_matches = mask is None or mask["size"] == sizes.get(image_id)
        if not (image_id in sizes and category_id in class_indices and size_matches):
            what = f"image {image_id}, category {category_id}"
            raise InputError(f"{path} ({what}) does not fit {dataset_name!r}: another dataset's? {hint}")
        predictions[image_id].append(result | {"category_id": class_indices[category_id]})
    return predictions


def _is_coco_result(result) -> bool:
    types = {"image_id": int | str, "category_id": int, "bbox": list, "score": int | float}
    if not isinstance(result, dict):
        return False
    if not all(isinstance(result.get(key), kind) for key, kind in types.items()):
        return False
    mask = result.get("segmentation")
    is_mask = mask is None or (isinstance(mask, dict) and {"size", "counts"} <= mask.keys())
    return is_mask and len(result["bbox"]) == 4


def _read_segments(path: Path, dataset_name: str, records: list[dict], metadata) -> dict[str, list[dict]]:
    """Predicted segments by image file, with ``category_id`` mapped to the contiguous class index."""
    hint = f"evaluate the model on {dataset_name!r} to write it"
    content = _read_json(path, hint=hint)
    identity = {index: index for index in range(len(metadata.stuff_classes))}
    class_indices = metadata.get("stuff_dataset_id_to_contiguous_id", identity)
    known = {record["file_name"] for record in records}
    segments = defaultdict(list)
    for segment in content if isinstance(content, list) else [content]:
        if not _is_segment(segment):
            raise InputError(f"{path} is no list of segments; {hint}")
        file_name, category_id = segment["file_name"], segment["category_id"]
        if file_name not in known or category_id not in class_indices:
            what = f"{file_name}, category {category_id}"
            raise InputError(f"{path} ({what}) does not fit {dataset_name!r}: another dataset's? {hint}")
        segments[file_name].append(segment | {"category_id": class_indices[category_id]})
    return segments


def _is_segment(segment) -> bool:
    types = {"file_name": str, "category_id": int, "segmentation": dict}
    if not isinstance(segment, dict) or not all(isinstance(segment.get(key), kind) for key, kind in types.items()):
        return False
    return {"size", "counts"} <= segment["segmentation"].keys()


def _class_indices(metadata) -> dict[int, int]:
    """Class index of each of the dataset's own category ids."""
    identity = {index: index for index in range(len(metadata.thing_classes))}
    return metadata.get("thing_dataset_id_to_contiguous_id", identity)


def _read_record_image(record: dict) -> np.ndarray:
    """The record's image (H, W, 3) uint8 RGB."""
    path = record["file_name"]
    image = read_image(path, "RGB")
    expected = record.get("height", image.shape[0]), record.get("width", image.shape[1])
    if image.shape[:2] != expected:
        raise InputError(f"{path} is {image.shape[:2]} pixels high and wide, its annotations say {expected}")
    return image


# -- drawing ---------------------------------------------------------------------------------------


def _draw_row(record: dict, predictions: list[dict], metadata, score_threshold: float) -> np.ndarray:
    """Ground truth and predictions of one image: (row height, row width, 3) uint8 RGB."""
    image = _read_record_image(record)
    truth = record.get("annotations", [])
    size = f"image {record['image_id']}, {record['height']} x {record['width']}"
    left = _draw_panel(image, truth, metadata, title=f"ground truth: {len(truth)} ({size})")
    title = f"predictions: {len(predictions)} (score >= {score_threshold:g})"
    right = _draw_panel(image, predictions, metadata, title=title)
    return np.hstack([left, np.full((len(left), GAP, 3), 255, np.uint8), right])


def _draw_panel(image: np.ndarray, instances: list[dict], metadata, *, title: str) -> np.ndarray:
    """``image`` with instances drawn, below a title: (HEADER + drawn height, PANEL_WIDTH, 3) uint8 RGB."""
    height, width = image.shape[:2]
    scale = min(PANEL_WIDTH / width, PANEL_HEIGHT / height)
    return panel_below_title(draw_instances(image, instances, metadata, scale=scale), round(height * scale), title)


def _draw_label_row(record: dict, read_labels: Callable, segments: list[dict], metadata) -> np.ndarray:
    """Label image and predicted segments of one image: (row height, row width, 3) uint8 RGB."""
    image = _read_record_image(record)
    truth = read_labels(record["sem_seg_file_name"])
    predicted = np.full(image.shape[:2], IGNORED_LABEL, np.uint8)
    for labels, what in ((truth, record["sem_seg_file_name"]), *((_mask(s), record["file_name"]) for s in segments)):
        if labels.shape != image.shape[:2]:
            raise InputError(f"{what}: an image of {image.shape[:2]} pixels has labels of {labels.shape}")
    for segment in segments:
        predicted[_mask(segment).astype(bool)] = segment["category_id"]
    known = truth != IGNORED_LABEL
    correct = (predicted == truth)[known].mean() if known.any() else float("nan")
    name = f"{Path(record['file_name']).stem}, {image.shape[0]} x {image.shape[1]}"
    left = _draw_label_panel(image, truth, metadata, title=f"ground truth ({name})")
    right = _draw_label_panel(image, predicted, metadata, title=f"prediction: {correct:.1%} of its pixels are right")
    return np.hstack([left, np.full((len(left), GAP, 3), 255, np.uint8), right])


def _mask(segment: dict) -> np.ndarray:
    return mask_util.decode(segment["segmentation"])


def _draw_label_panel(image: np.ndarray, labels: np.ndarray, metadata, *, title: str) -> np.ndarray:
    """``image`` with its labels (H, W) in colour, below a title: (HEADER + drawn height, PANEL_WIDTH, 3) uint8 RGB."""
    height, width = image.shape[:2]
    scale = min(PANEL_WIDTH / width, PANEL_HEIGHT / height)
    return panel_below_title(draw_labels(image, labels, metadata, scale=scale), round(height * scale), title)
