"""Time and memory of reading, checking and evaluating synthetic COCO annotations."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import torch
from detectron2.data import MetadataCatalog
from detectron2.structures import Boxes, Instances

from backbones import ConfigError
from projects_vil import files
from projects_vil.config import load_config
from projects_vil.data import (
    Categories,
    CocoFile,
    build_test_loader,
    build_train_loader,
    read_datasets,
    register_datasets,
)
from projects_vil.evaluation import COCOEvaluator, build_evaluator
from projects_vil.inference.parquet_writer import schema_of, write_part
from projects_vil.utils import call_in_new_process, memory_of

# COCO has 80 classes and about 7 objects per image.
NUM_CLASSES, NUM_OBJECTS, NUM_POINTS = 80, 7, 24
HEIGHT, WIDTH = 480, 640
RETINANET = Path(__file__).resolve().parents[2] / "configs/base/retinanet.yaml"


def cost_of_evaluation(*, num_images: int, num_detections: int) -> dict[str, Any]:
    """Evaluate synthetic detections in a new process.

    Args:
        num_images: Images in the synthetic dataset, with ``NUM_OBJECTS`` objects each.
        num_detections: Detections per image; half of them are close to an object.

    Returns:
        ``seconds``, ``metrics``, and ``memory``, the peak of the process in bytes (``None`` without /proc).
    """
    with tempfile.TemporaryDirectory() as folder:
        objects = write_annotations(Path(folder) / "annotations.json", np.random.default_rng(0), num_images)
        return call_in_new_process(_evaluate, folder, *objects, num_detections)


def _evaluate(folder: str, boxes: np.ndarray, classes: np.ndarray, num_detections: int) -> dict[str, Any]:
    names = [str(index) for index in range(NUM_CLASSES)]
    ids = {index + 1: index for index in range(NUM_CLASSES)}
    facts = {"thing_classes": names, "thing_dataset_id_to_contiguous_id": ids}
    MetadataCatalog.get(folder).set(json_file=f"{folder}/annotations.json", **facts)
    generator, start = np.random.default_rng(1), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator = COCOEvaluator(folder, output_dir=folder, check="off")
        evaluator.reset()
        for index, objects in enumerate(zip(boxes, classes, strict=True)):
            instances = _sample_detections(generator, *objects, num_detections)
            evaluator.process([{"image_id": index + 1}], [{"instances": instances}])
        metrics = evaluator.evaluate()["bbox"]
    return {"seconds": time.perf_counter() - start, "memory": memory_of(peak=True), "metrics": metrics}


def cost_of_predictions(*, num_images: int, num_detections: int = 100) -> dict[int, tuple[float, float]]:
    """Run ``vil eval --predictions`` on synthetic detections with 1 and 2 processes, and compare their metrics.

    A second evaluation of a tenth of the images gives the cost of the start, which is subtracted.

    Returns:
        By the number of processes: seconds per image, and processor seconds of all processes per image, which do not
        depend on the other work of the machine.
    """
    costs: dict[int, list[np.ndarray]] = {1: [], 2: []}
    results, few = [], max(num_images // 10, 1)
    for number in (few, num_images):
        with tempfile.TemporaryDirectory() as folder:
            _write_predictions(Path(folder), number, num_detections)
            for processes, measurements in costs.items():
                output = f"{folder}/{processes}"
                words = ["eval", f"{folder}/data", "--predictions", f"{folder}/found", "--output", output]
                words += ["--num-gpus", str(processes), "DATASETS.CHECK", "off"]
                start = np.array([time.perf_counter(), *os.times()[2:4]])
                subprocess.run([sys.executable, "-m", "vil", *words], check=True, stdout=subprocess.DEVNULL)
                seconds = np.array([time.perf_counter(), *os.times()[2:4]]) - start
                measurements.append(np.array([seconds[0], seconds[1:].sum()]))
                results += json.loads(Path(f"{output}/evaluation.json").read_text()).values()
            if str(results.pop()) != str(results.pop()):
                raise ConfigError("The metrics of 1 and 2 processes differ.")
    return {number: tuple((all_ - few_) / (num_images - few)) for number, (few_, all_) in costs.items()}


def _write_predictions(folder: Path, num_images: int, num_detections: int) -> None:
    """Write a dataset to ``data``, and detections to ``found`` in the format of ``vil predict``."""
    (folder / "data").mkdir()
    (folder / "found").mkdir()
    objects = write_annotations(folder / "data/annotations.json", np.random.default_rng(0), num_images)
    write_images(folder / "data/images", num_images)
    names = [str(index) for index in range(NUM_CLASSES)]
    schema = schema_of(Categories(tuple(range(1, NUM_CLASSES + 1)), tuple(names)), {})
    generator = np.random.default_rng(1)
    for part in range(0, num_images, 1024):
        rows = []
        for index in range(part, min(part + 1024, num_images)):
            detections = _sample_detections(generator, *(array[index] for array in objects), num_detections)
            rows.append({"file_name": f"{index + 1:012d}.jpg", "height": HEIGHT, "width": WIDTH})
            rows[-1] |= {"boxes": detections.pred_boxes.tensor.tolist(), "scores": detections.scores.tolist()}
            rows[-1]["category_ids"] = (detections.pred_classes + 1).tolist()
        write_part(folder / f"found/part-{part:06}.parquet", pa.Table.from_pylist(rows, schema))


def time_dataset_check(*, num_images: int) -> dict[str, float | None]:
    """Check synthetic annotations with masks and their images, as ``vil check`` does, in a new process.

    Returns:
        ``file_size`` of the annotations in bytes, ``seconds``, and ``memory``, the peak of the process in bytes
        (``None`` without /proc).
    """
    with tempfile.TemporaryDirectory() as folder:
        annotations, images = Path(folder) / "annotations.json", Path(folder) / "images"
        write_annotations(annotations, np.random.default_rng(0), num_images)
        write_images(images, num_images)
        return {"file_size": annotations.stat().st_size} | call_in_new_process(_time_check, annotations, images)


def _time_check(annotations: Path, images: Path) -> dict[str, float | None]:
    start = time.perf_counter()
    CocoFile(annotations, images).lines()
    return {"seconds": time.perf_counter() - start, "memory": memory_of(peak=True)}


def cost_of_reading(*, num_images: int, num_objects: int = 15) -> list[dict[str, Any]]:
    """Read a COCO file of boxes and a file of a third of its size, for training and for evaluation, in new processes.

    Both are read as large files.

    Returns:
        For each purpose and file ``purpose``, ``images``, ``seconds`` of processor time, and in bytes ``peak`` and
        ``memory`` afterwards.
    """
    rows = []
    for number in (num_images // 3, num_images):
        with tempfile.TemporaryDirectory() as folder:
            random = np.random.default_rng(0)
            write_annotations(Path(folder) / "annotations.json", random, number, num_objects, masks=False)
            write_images(Path(folder) / "images", number)
            for purpose in ("training", "evaluation"):
                rows.append(call_in_new_process(_read, folder, purpose) | {"purpose": purpose, "images": number})
    return rows


def _read(folder: str, purpose: str) -> dict[str, float | None]:
    files.LARGE_FILE = 0
    datasets = {key: repr(("synthetic",) if key == purpose else ()) for key in ("training", "evaluation")}
    coco = repr([["synthetic", f"{folder}/annotations.json", f"{folder}/images"]])
    keys = ["DATASETS.COCO", coco, "DATASETS.TRAIN", datasets["training"], "DATASETS.TEST", datasets["evaluation"]]
    keys += ["MODEL.RETINANET.NUM_CLASSES", str(NUM_CLASSES), "DATALOADER.NUM_WORKERS", "0", "OUTPUT_DIR", folder]
    cfg, start = load_config(RETINANET, keys), time.process_time()
    register_datasets(cfg)
    read_datasets(cfg, train=purpose == "training")
    if purpose == "training":
        loader = build_train_loader(cfg)
    else:
        loader = build_test_loader(cfg, "synthetic"), build_evaluator(cfg, "synthetic")
    seconds, memory = time.process_time() - start, memory_of()
    del loader
    return {"seconds": seconds, "memory": memory, "peak": memory_of(peak=True)}


def write_annotations(
    path: Path, generator: np.random.Generator, num_images: int, num_objects: int = NUM_OBJECTS, *, masks: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Write a COCO file of random boxes, each with its inscribed ellipse as the mask.

    Returns:
        Boxes (num_images, num_objects, 4) as left, top, width, height in pixels, and class indices (num_images,
        num_objects).
    """
    boxes = _sample_boxes(generator, num_images * num_objects)
    classes = generator.integers(NUM_CLASSES, size=len(boxes))
    angles = np.linspace(0, 2 * np.pi, NUM_POINTS, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1) / 2 + 0.5

    def annotation(index: int) -> dict[str, Any]:
        box = boxes[index]
        mask = {"segmentation": [(box[:2] + circle * box[2:]).round(2).ravel().tolist()]} if masks else {}
        ids = {"id": index + 1, "image_id": index // num_objects + 1, "category_id": int(classes[index]) + 1}
        return ids | {"iscrowd": 0, "bbox": box.round(2).tolist(), "area": round(float(box[2] * box[3]), 2)} | mask

    images = [
        {"id": n, "file_name": f"{n:012d}.jpg", "height": HEIGHT, "width": WIDTH} for n in range(1, num_images + 1)
    ]
    categories = [{"id": index + 1, "name": str(index)} for index in range(NUM_CLASSES)]
    # Written one by one, because the list of all annotations would need more memory than the measured processes.
    with path.open("w") as file:
        file.write(json.dumps({"images": images, "categories": categories})[:-1] + ', "annotations": [')
        for index in range(len(boxes)):
            file.write(", " * (index > 0) + json.dumps(annotation(index)))
        file.write("]}")
    return boxes.reshape(num_images, num_objects, 4), classes.reshape(num_images, num_objects)


def write_images(folder: Path, num_images: int) -> None:
    """Write the images of :func:`write_annotations`, as links to one black image."""
    folder.mkdir()
    cv2.imwrite(str(folder.with_name("photo.jpg")), np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    for index in range(num_images):
        (folder / f"{index + 1:012d}.jpg").symlink_to("../photo.jpg")


def _sample_boxes(generator: np.random.Generator, number: int) -> np.ndarray:
    """Return random boxes inside the image, (number, 4), as left, top, width, height in pixels."""
    sizes = np.exp(generator.uniform(np.log(8), np.log(300), (number, 2)))
    return np.concatenate([generator.random((number, 2)) * ([WIDTH, HEIGHT] - sizes), sizes], axis=1)


def _sample_detections(
    generator: np.random.Generator, boxes: np.ndarray, classes: np.ndarray, number: int
) -> Instances:
    """Return random detections of one image in float64; about half of them are close to an object."""
    index = generator.integers(len(boxes), size=number)
    near = boxes[index] + generator.normal(0, 0.1, (number, 4)) * np.tile(boxes[index][:, 2:], 2)
    is_near = generator.random(number) < 0.5
    boxes = np.where(is_near[:, None], near, _sample_boxes(generator, number))
    scores = generator.random(number) * np.where(is_near, 1.0, 0.5)
    labels = np.where(is_near, classes[index], generator.integers(NUM_CLASSES, size=number))
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].clip(1)], axis=1)
    fields = {"pred_boxes": Boxes(torch.from_numpy(corners)), "scores": torch.from_numpy(scores)}
    return Instances((HEIGHT, WIDTH), **fields, pred_classes=torch.from_numpy(labels))
