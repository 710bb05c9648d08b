"""Draw annotations, training samples, and predictions next to the ground truth."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog
from detectron2.structures import BitMasks, BoxMode

from backbones.errors import ConfigError, check_whole, explained_errors
from projects_vil.config import is_panoptic, is_segmentor, with_overrides
from projects_vil.data import IGNORED_LABEL, build_train_loader, label_reader, load_dataset, read_image
from projects_vil.data.coco_checks import CHECKS, CocoFile, box_of_mask
from projects_vil.data.readers import as_box
from projects_vil.files import read_json
from projects_vil.visualization import drawing
from vil.choices import SCORE_THRESHOLD

DRAWINGS_FOLDER = "drawings"
DRAWN_NOTES = ("zero_area_bbox", "bbox_misfits_mask", "bbox_exceeds_image", "duplicate_object")
MIN_SAMPLE_SIDE = 640  # smaller samples are enlarged to this many pixels, so that labels are legible


def draw_results(
    dataset_name: str,
    records: Sequence[dict[str, Any]],
    predictions: str | Path,
    output: str | Path,
    *,
    num_images: int = 8,
    score_threshold: float = SCORE_THRESHOLD,
) -> None:
    """Draw the ground truth and the predictions of images that are evenly distributed over a dataset.

    Args:
        dataset_name: A name in detectron2's catalog.
        records: The records of the dataset, as in an evaluation.
        predictions: ``coco_instances_results.json`` of COCOEvaluator, or ``sem_seg_predictions.json`` of
            SemSegEvaluator.
        output: The PNG or JPEG file. Its folder is created.
        num_images: Number of images.
        score_threshold: Lowest score of a drawn detection.

    Raises:
        ConfigError: If a file cannot be read, or if the predictions are of another dataset.
    """
    metadata = MetadataCatalog.get(dataset_name)
    is_sem_seg = metadata.get("evaluator_type") == "sem_seg"
    key = "file_name" if is_sem_seg else "image_id"
    by_image = _predictions_by_image(Path(predictions), dataset_name, [record[key] for record in records], key)
    rows = []
    for record in _evenly_spaced(records, num_images):
        image = read_image(record["file_name"])
        size, detections = image.shape[:2], by_image[record[key]]
        if any(tuple(item.get("segmentation", {}).get("size", size)) != size for item in detections):
            name = record["file_name"]
            raise ConfigError(f"Masks in '{predictions}' differ in size from '{name}'. Predict on this dataset.")
        name = f"{Path(record['file_name']).stem}, {size[0]} x {size[1]}"
        scale = min(drawing.PANEL_WIDTH / size[1], drawing.PANEL_HEIGHT / size[0])
        if is_sem_seg:
            truth = label_reader(dataset_name)(record["sem_seg_file_name"])
            predicted = np.full(size, IGNORED_LABEL, np.uint8)
            for item in detections:
                predicted[mask_util.decode(item["segmentation"]).astype(bool)] = item["category_id"]
            correct = (predicted == truth)[truth != IGNORED_LABEL].mean()
            titles = f"ground truth ({name})", f"prediction: {correct:.1%} of pixels correct"
            panels = [drawing.draw_labels(image, labels, metadata, scale=scale) for labels in (truth, predicted)]
        else:
            truth = record.get("annotations", [])
            shown = [item for item in detections if item["score"] >= score_threshold]
            titles = f"ground truth: {len(truth)} ({name})", f"predictions: {len(shown)} (score >= {score_threshold:g})"
            panels = [drawing.draw_instances(image, items, metadata, scale=scale) for items in (truth, shown)]
        rows.append(list(zip(titles, panels, strict=True)))
    drawing.write_image(Path(output), drawing.sheet(f"{dataset_name}: {len(rows)} of {len(records)} images", rows))


def _evenly_spaced(entries: Sequence[Any], number: int) -> list[Any]:
    indices = np.linspace(0, len(entries) - 1, min(number, len(entries)))
    return [entries[index] for index in indices.round().astype(int)]


def draw_annotations(file: CocoFile, output: Path, *, num_images: int = 16) -> str:
    """Draw annotations of a checked COCO file. Images with findings come first, then other images with objects.

    Annotations with findings are red and dashed, with the names of the findings as labels.

    Args:
        file: The file and its findings.
        output: The PNG file. Its folder is created.
        num_images: Number of images, which are evenly distributed over the file.

    Returns:
        A line of text with the file, and with the number of annotations with findings that cannot be drawn.

    Raises:
        ConfigError: If no image has a file, or if a file cannot be read or written.
    """
    skipped = {*file.found["invalid_image_entry"], *file.found["unreadable_image_file"]}
    paths = {i: Path(file.image_root, one["file_name"]) for i, one in enumerate(file.images) if i not in skipped}
    paths = {index: path for index, path in paths.items() if path.is_file()}
    if not paths:
        advice = "If the images are inside annotation files, add --fix OUT."
        raise ConfigError(f"Cannot draw {output.stem}: no image file can be read. {advice}")
    findings = defaultdict(list)
    for check in [*file.findings("error"), *map(CHECKS.__getitem__, DRAWN_NOTES)]:
        of_image = np.isin(file.image_of, file.found[check.name]) if check.key == "images" else ()
        for index in [*np.flatnonzero(of_image).tolist(), *(file.found[check.name] * (check.key == "annotations"))]:
            findings[index].append(check.name)
    without_box = {i for name in ("invalid_bbox", "missing_bbox", "missing_bbox_and_mask") for i in file.found[name]}

    def with_box(index: int) -> dict[str, Any] | None:
        entry = file.annotations[index]
        return box_of_mask(file, index, entry) if index in without_box else entry | {"bbox": as_box(entry["bbox"])}

    drawn = [index for index in findings if file.image_of[index] in paths and with_box(index)]
    wrong = sorted({int(file.image_of[index]) for index in drawn})
    others = sorted({*file.image_of.tolist()} & paths.keys() - set(wrong)) or sorted(paths.keys() - set(wrong))
    names = {index: str(file.categories[index]["name"]) for index in file.category_by_id.values()}
    panels = []
    for number in (_evenly_spaced(wrong, num_images) + _evenly_spaced(others, num_images))[:num_images]:
        image, objects = read_image(paths[number]), []
        for index in np.flatnonzero(file.image_of == number).tolist():
            if entry := with_box(index):
                entry |= {"category_id": int(file.category_of[index]), "finding": ", ".join(findings.get(index, ()))}
                objects.append(entry | {"segmentation": file.mask(index, entry)})
        scale = min(drawing.PANEL_WIDTH / image.shape[1], drawing.PANEL_HEIGHT / image.shape[0])
        panel = drawing.draw_instances(image, objects, Metadata(thing_classes=names), scale=scale)
        panels.append((f"{paths[number].name}, objects: {len(objects)}", panel))
    title = f"{output.stem}: {len(panels)} of {len(paths)} images"
    drawing.write_image(output, drawing.sheet(title, [panels[first : first + 4] for first in range(0, len(panels), 4)]))
    number = len(findings) - len(drawn)
    parts = ["annotations with findings are red"] * bool(drawn)
    parts += [f"left out: {number:,} without image or box"] * bool(number)
    return f"wrote {output}" + f" ({'; '.join(parts)})" * bool(parts)


def draw_evaluation(cfg: CfgNode, *, name: str) -> None:
    """Draw ``TEST.NUM_VISUALIZED_IMAGES`` images of each test set into ``OUTPUT_DIR/drawings/DATASET_NAME.jpg``.

    Each evaluation draws the same images. If a drawing fails, a warning is logged.
    """
    if not cfg.TEST.NUM_VISUALIZED_IMAGES:
        return
    output = Path(cfg.OUTPUT_DIR)
    for dataset in cfg.DATASETS.TEST:
        if MetadataCatalog.get(dataset).get("evaluator_type") not in ("coco", "coco_panoptic_seg", "sem_seg"):
            continue
        path = output / DRAWINGS_FOLDER / f"{dataset}_{name}.jpg"
        try:
            records = load_dataset(cfg, [dataset], train=False)
            file = predictions_file(output, dataset)
            draw_results(dataset, records, file, path, num_images=cfg.TEST.NUM_VISUALIZED_IMAGES)
        except (ConfigError, OSError) as error:
            logging.getLogger(__name__).warning("Cannot draw %s: %s", dataset, error)


def predictions_file(run: Path, dataset_name: str) -> Path:
    """Return the file with the predictions of a run. With several test datasets, each has its own folder."""
    is_sem_seg = MetadataCatalog.get(dataset_name).get("evaluator_type") == "sem_seg"
    name = "sem_seg_predictions.json" if is_sem_seg else "coco_instances_results.json"
    dataset_file = run / "inference" / dataset_name / name
    return dataset_file if dataset_file.exists() else run / "inference" / name


def draw_samples(cfg: CfgNode, output: str | Path, *, number: int = 16, seed: int | None = None) -> list[Path]:
    """Draw the first augmented training samples of a run with one process, as one PNG file per sample.

    Args:
        cfg: The config of the run. Its datasets are registered.
        output: The folder of the drawings, which is created.
        number: Number of samples.
        seed: The seed of the run. By default ``SEED``, or 0 if ``SEED`` is negative.

    Raises:
        ConfigError: If the dataset check fails, or if a file cannot be written.
    """
    seed = max(cfg.SEED, 0) if seed is None else seed
    check_whole("seed", seed, least=0)
    # The samples do not depend on the number of workers.
    loader = build_train_loader(with_overrides(cfg, {"DATALOADER.NUM_WORKERS": 0}))
    loader.start(seed=seed, iteration=0)
    paths = []
    for index, sample in enumerate(islice(chain.from_iterable(loader), number)):
        paths.append(Path(output) / f"{index:04d}_{Path(sample['file_name']).stem}.png")
        drawing.write_image(paths[-1], draw_sample(cfg, sample))
    return paths


def draw_sample(cfg: CfgNode, sample: dict[str, Any]) -> np.ndarray:
    """Draw one sample of a training loader with a title: (height, width, 3) uint8 RGB.

    For panoptic models, the semantic labels are drawn as a second image below the objects.
    """
    channels = sample["image"].permute(1, 2, 0).numpy().round().astype(np.uint8)
    image = np.ascontiguousarray(channels[..., ::-1] if cfg.INPUT.FORMAT == "BGR" else channels)
    metadata = MetadataCatalog.get(cfg.DATASETS.TRAIN[0])
    height, width = image.shape[:2]
    scale = max(1, MIN_SAMPLE_SIDE / max(height, width))
    title = " + ".join(Path(sample[key]).name for key in ("file_name", "pasted_from") if key in sample)
    title += f", height {height}, width {width}"
    drawn = []
    if not is_segmentor(cfg):
        instances = sample["instances"]
        title += f", objects: {len(instances)}"
        masks = instances.gt_masks if instances.has("gt_masks") else [None] * len(instances)
        masks = masks.tensor.numpy() if isinstance(masks, BitMasks) else getattr(masks, "polygons", masks)
        columns = instances.gt_boxes.tensor.tolist(), instances.gt_classes.tolist(), masks
        objects = [
            {"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": index, "segmentation": mask}
            for box, index, mask in zip(*columns, strict=True)
        ]
        drawn.append(drawing.draw_instances(image, objects, metadata, scale=scale))
    if is_segmentor(cfg) or is_panoptic(cfg):
        drawn.append(drawing.draw_labels(image, sample["sem_seg"].numpy(), metadata, scale=scale))
    return drawing.sheet(title, [[("", panel)] for panel in drawn])


def _predictions_by_image(path: Path, dataset_name: str, images: list, key: str) -> dict[Any, list[dict]]:
    """Return the predictions of each image with class indices as ``category_id``. ``key`` identifies the image."""
    metadata = MetadataCatalog.get(dataset_name)
    name = "stuff" if key == "file_name" else "thing"
    indices = metadata.get(f"{name}_dataset_id_to_contiguous_id") or range(len(metadata.get(f"{name}_classes")))
    by_image: dict[Any, list[dict]] = {image: [] for image in images}
    with explained_errors(path, f"is damaged, or does not belong to {dataset_name!r}", "Evaluate again."):
        for item in read_json(path, what="results file of an evaluation"):
            by_image[item[key]].append(item | {"category_id": indices[item["category_id"]]})
    return by_image
