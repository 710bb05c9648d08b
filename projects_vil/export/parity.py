"""The parity check: an exported model must return the same detections as its detectron2 detector.

:func:`check_export` compares both and returns the report. :func:`describe_report` formats it.
"""

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from backbones import ConfigError
from backbones.errors import explained_errors
from projects_vil.data import build_test_loader, check_files, read_image, register_datasets, size_for_testing, to_input
from projects_vil.evaluation import build_evaluator
from projects_vil.export.formats import FORMATS, check_onnx
from projects_vil.export.runtime import ExportedModel, check_sides, letterbox_size, pad_image
from projects_vil.modeling import MAX_EXPORT_SIDE, MIN_EXPORT_SIDE

# The largest accepted differences: boxes in pixels, scores and masks as probabilities. The values for lower precisions
# cover the rounding of the network.
TOLERANCES = {
    "fp32": {"boxes": 1e-2, "scores": 1e-4, "masks": 1e-3},
    "fp16": {"boxes": 1.0, "scores": 2e-2, "masks": 5e-2},
    "bf16": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
    "int8": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
}
# The fraction of detections per image that may differ by more. After rounding, non-maximum suppression can keep the
# other one of two nearly equal candidates. int8 has no fraction: its check compares average precision instead of pairs.
CHANGED_SHARE = {"fp32": 0.0, "fp16": 0.1, "bf16": 0.1, "int8": None}
# Within this distance of the score threshold, or of the lowest score of a full list, a detection may be missing.
BORDERLINE = TOLERANCES["fp32"]["scores"]
# The largest accepted difference of average precision in points, and the largest drop of int8.
AP_TOLERANCE, AP_DROP = 0.1, 1.0
Outputs = Mapping[str, Tensor]
DetectFn = Callable[[Tensor], Outputs]
_logger = logging.getLogger(__name__)
_VERDICTS = {True: "; equal", False: "; NOT EQUAL", None: ""}


# -- images ----------------------------------------------------------------------------------------


def example_image(height: int, width: int, *, seed: int = 0) -> Tensor:
    """Return a (3, height, width) uint8 image of bright rectangles on dim noise."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, height, width, generator=generator) * 60
    for _ in range(6):
        top, left = (int(torch.randint(0, side * 3 // 4, (), generator=generator)) for side in (height, width))
        color = 100 + 155 * torch.rand(3, 1, 1, generator=generator)
        image[:, top : top + height // 5, left : left + width // 5] = color
    return image.to(torch.uint8)


def parity_images(
    cfg: CfgNode,
    files: Sequence[str | Path] = (),
    *,
    fixed: tuple[int, int] | None = None,
    sides: Sequence[int] = (MIN_EXPORT_SIDE, MAX_EXPORT_SIDE),
) -> list[tuple[str, Tensor]]:
    """Return the name and the pixels (3, H, W), uint8, of the images of a parity check.

    Args:
        cfg: The config of the detector; files are read and resized as in testing.
        files: Image files. By default four images of ``DATASETS.TEST`` and two synthetic images of other sizes, or four
            synthetic images without a dataset or with tiles.
        fixed: Height and width for a model that accepts only one size.
        sides: The smallest and largest side that the model accepts, in pixels.

    Raises:
        ConfigError: If a file cannot be read, or if an image has another size than the model accepts.
    """
    images = [(str(file), _read(cfg, file, fixed)) for file in files] or _dataset_images(cfg, fixed, sides)
    if not files:
        sizes = [fixed or size_for_testing(cfg, *size) for size in ((400, 600), (600, 450), (360, 600), (500, 500))]
        if not fixed:
            # The last one is smaller than in testing.
            sizes[-1] = tuple(side // 2 + 3 for side in sizes[-1])
            sizes = [tuple(max(side, MIN_EXPORT_SIDE) for side in size) for size in sizes]
        synthetic = [("synthetic image", example_image(*size, seed=seed)) for seed, size in enumerate(sizes, start=1)]
        images += synthetic[2 if images else 0 :]
    for name, image in images:
        check_sides(sides, image.shape[1:], what=name)
    return images


def _dataset_images(cfg: CfgNode, fixed: tuple[int, int] | None, sides: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Return up to four images of ``DATASETS.TEST`` that the model accepts. Log why images cannot be read."""
    # The exported file does not divide images into tiles.
    names, images, files = () if cfg.TEST.TILE_SIZE else cfg.DATASETS.TEST, [], []
    try:
        register_datasets(cfg)
        for name in names:
            check_files(name)
            # The annotations are not used, so they are not checked.
            with explained_errors(name, "cannot be read", "See 'vil check'."):
                files += [record["file_name"] for record in DatasetCatalog.get(name)]
        for index in range(min(4, len(files))):
            file = files[index * len(files) // min(4, len(files))]
            image = _read(cfg, file, fixed)
            if sides[0] <= min(image.shape[1:]) and max(image.shape[1:]) <= sides[1]:
                images.append((file, image))
    except ConfigError as error:
        # The dataset may have been moved since the training.
        _logger.info("The parity check has synthetic images. %s", error)
    return images


def _read(cfg: CfgNode, file: str | Path, fixed: tuple[int, int] | None) -> Tensor:
    pixels = read_image(file)
    height, width = pixels.shape[:2]
    size = letterbox_size(height, width, fixed) if fixed else size_for_testing(cfg, height, width)
    image = to_input(pixels, size, cfg.INPUT.FORMAT)
    return pad_image(image, fixed, cfg.MODEL.PIXEL_MEAN) if fixed else image


# -- pairs of detections ---------------------------------------------------------------------------


def compare_detections(ours: Outputs, theirs: Outputs, precision: str, thresholds: Mapping[str, float]) -> dict:
    """Measure the differences between the detections of the detector and of the exported model in one image.

    Detections are paired by class and box, not by rank, because scores that differ by rounding change the order. An
    unpaired detection is borderline, and no error, if its score is within ``BORDERLINE`` of the threshold or, in a
    full list, of the lowest score.

    Args:
        ours, theirs: Boxes (D, 4), scores (D,), classes (D,), and for Mask R-CNN masks (D, 1, S, S).
        precision: A key of ``TOLERANCES`` and ``CHANGED_SHARE``.
        thresholds: ``thresholds`` of the metadata; a negative ``detections_per_image`` means no limit.

    Returns:
        ``detections`` and ``detections_exported``; the number of ``pairs``; ``unmatched``: detections without a partner
        of their class, except borderline ones; ``borderline``; ``changed``: pairs that differ by more than a tolerance;
        the largest difference of ``boxes``, ``scores`` and ``masks`` in pairs; and ``ok``, ``None`` if pairs do not
        decide.
    """
    tolerances, changed_share, borderline = TOLERANCES[precision], CHANGED_SHARE[precision], 0
    distance = (ours["boxes"].float()[:, None] - theirs["boxes"].float()).abs().amax(2)
    # Infinity never matches.
    distance[distance.isnan() | (ours["classes"][:, None] != theirs["classes"])] = torch.inf
    pairs = _pair(distance, at_most=tolerances["boxes"])
    for axis, scores in enumerate((ours["scores"], theirs["scores"])):
        lowest = thresholds["score"]
        if 0 < thresholds["detections_per_image"] <= len(scores):
            lowest = max(lowest, scores.min().item())
        missing = scores <= lowest + BORDERLINE
        missing[[pair[axis] for pair in pairs]] = False
        borderline += int(missing.sum())
        distance.index_fill_(axis, missing.nonzero()[:, 0], torch.inf)
    # The other detections are paired beyond the tolerance too, to report their distance.
    pairs += _pair(distance, at_most=torch.finfo(torch.float32).max)
    row: dict = {
        "detections": len(ours["scores"]),
        "detections_exported": len(theirs["scores"]),
        "pairs": len(pairs),
        "unmatched": sum(distance.shape) - 2 * len(pairs) - borderline,
        "borderline": borderline,
    }
    our_rows, their_rows = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
    within = torch.ones(len(pairs), dtype=torch.bool)
    for name in filter(ours.__contains__, tolerances):
        difference = (ours[name][our_rows].float() - theirs[name][their_rows].float()).abs()
        row[name] = difference.max().item() if difference.numel() else 0.0
        within &= (difference <= tolerances[name]).view(len(pairs), *difference.shape[1:], 1).flatten(1).all(1)
    row["changed"] = int((~within).sum())
    wrong = row["unmatched"] + row["changed"]
    row["ok"] = None if changed_share is None else wrong <= changed_share * row["detections"]
    return row


def _pair(distance: Tensor, *, at_most: float) -> list[tuple[int, int]]:
    """Return pairs (row, column): each row, in order, with its nearest free column. Both become infinite."""
    pairs = []
    for row in range(len(distance) if distance.numel() else 0):
        column = int(distance[row].argmin())
        if distance[row, column] <= at_most:
            pairs.append((row, column))
            distance[row], distance[:, column] = torch.inf, torch.inf
    return pairs


def eager_detections(detector: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return the detections of detectron2's own inference, by the output names of an exported model.

    Args:
        detector: A detectron2 model in eval mode.
        image: (3, H, W).

    Returns:
        Boxes (D, 4), scores (D,), classes (D,), and masks (D, 1, S, S) relative to their boxes. As in detectron2's
        post-processing, empty boxes are removed.
    """
    batch = [{"image": image}]
    with torch.no_grad():
        if isinstance(detector, GeneralizedRCNN):
            instances = detector.inference(batch, do_postprocess=False)[0]
        else:
            instances = detector(batch)[0]["instances"]
    instances = instances[instances.pred_boxes.nonempty()]
    outputs = {"boxes": instances.pred_boxes.tensor, "scores": instances.scores, "classes": instances.pred_classes}
    return outputs | {"masks": instances.pred_masks} if instances.has("pred_masks") else outputs


# -- the report ------------------------------------------------------------------------------------


def measure_latency(reference: DetectFn, exported: DetectFn, image: Tensor) -> dict[str, float]:
    """Return the median milliseconds of both on one image, run alternately, and the speedup of the exported model."""
    times: dict[DetectFn, list[float]] = {reference: [], exported: []}
    for _ in range(1 + 5):
        for detector, milliseconds in times.items():
            start = time.perf_counter()
            detector(image)
            milliseconds.append(1000 * (time.perf_counter() - start))
    eager, ours = (statistics.median(values[1:]) for values in times.values())  # without the warm-up
    return {
        "eager_ms": round(eager, 3),
        "exported_ms": round(ours, 3),
        "ratio": round(eager / ours, 3),
        "height": image.shape[-2],
        "width": image.shape[-1],
        "threads": torch.get_num_threads(),
    }


def check_export(
    cfg: CfgNode,
    reference: nn.Module,
    model: ExportedModel,
    images: Sequence[tuple[str, Tensor]],
    *,
    evaluate: bool = False,
    accept_drop: bool = False,
) -> dict:
    """Compare an exported model with the detector that it was made from, and return the report (docs/export.md).

    A batched model gets each image twice, as the first and as the second of a batch of two. The other image of the
    batch is its mirror image.

    Args:
        cfg: The config of the detector.
        reference: The detector, in float32 and eval mode.
        model: The exported model.
        images: The result of :func:`parity_images`.
        evaluate: Whether to compare average precision on ``DATASETS.TEST`` too.
        accept_drop: Whether to accept any drop of average precision.

    Raises:
        RuntimeError: If an ONNX file is not portable, see :func:`projects_vil.export.formats.check_onnx`.
    """
    precision, thresholds = model.metadata["precision"], model.metadata["thresholds"]
    runtime = FORMATS[model.file_format].runtime
    eager = functools.partial(eager_detections, reference)
    rows = []
    for name, image in images:
        ours, mirrored = eager(image), image.flip(2)
        if model.batched:
            theirs = [model.run_each([image, mirrored])[0], model.run_each([mirrored, image])[1]]
        else:
            theirs = [model(image)]
        facts = {"file": Path(name).name, "height": image.shape[-2], "width": image.shape[-1]}
        rows += [facts | compare_detections(ours, outputs, precision, thresholds) for outputs in theirs]
    report = {
        "file": model.path.name,
        "format": model.file_format,
        "runtime": f"{runtime} {model.metadata['versions'][runtime]}",
        "opset": model.metadata["opset"],
        "precision": precision,
        "bytes": sum(file.stat().st_size for file in FORMATS[model.file_format].files(model.path)),
        "tolerances": TOLERANCES[precision],
        "changed_share": CHANGED_SHARE[precision],
        "images": rows,
        "latency": measure_latency(eager, lambda image: model.run_each([image])[0], images[0][1]),
        "versions": model.metadata["versions"],
        "accept_drop": accept_drop,
    }
    if model.file_format == "onnx":
        report["operators"] = check_onnx(model.path)
    if evaluate:
        report["evaluation"] = _evaluate(cfg, reference, model)
    evaluation = report.get("evaluation", ())
    report["ok"] = is_equal(rows) and all(row["ok"] or (accept_drop and row["AP_exported"]) for row in evaluation)
    return report


def is_equal(rows: Sequence[dict]) -> bool:
    """Return whether no result of :func:`compare_detections` failed, and there is at least one pair."""
    return any(row["pairs"] for row in rows) and all(row["ok"] is not False for row in rows)


def _evaluate(cfg: CfgNode, reference: nn.Module, model: ExportedModel) -> list[dict]:
    """Return the average precision of the detector and the exported model for each test dataset and task."""
    rows = []
    for name in cfg.DATASETS.TEST:
        results = []
        for detector in (reference, model.as_detectron2):
            evaluator = build_evaluator(cfg, name, None)
            results.append(inference_on_dataset(detector, build_test_loader(cfg, name), evaluator))
        for task in results[0]:
            eager, exported = (float(result[task]["AP"]) for result in results)
            if model.metadata["precision"] == "int8":
                # An average precision of 0 shows nothing about the export.
                is_ok = eager > 0 and eager - exported <= AP_DROP
            else:
                is_ok = abs(eager - exported) <= AP_TOLERANCE or (math.isnan(eager) and math.isnan(exported))
            # JSON has no NaN.
            ap, ap_exported = (None if math.isnan(value) else round(value, 3) for value in (eager, exported))
            rows.append({"dataset": name, "task": task, "AP": ap, "AP_exported": ap_exported, "ok": is_ok})
    return rows


def _advice(report: dict) -> list[str]:
    """Return a line that explains different detections and what to do, if there are any."""
    rows = [row for row in report["images"] if row["ok"] is False]
    if not rows:
        return []
    # Suppression in the other order replaces a box by a box with nearly the same score, or changes a few boxes.
    have_same_scores = all(row["scores"] <= report["tolerances"]["scores"] and not row["unmatched"] for row in rows)
    numbers = [(row["changed"] + row["unmatched"], row["pairs"]) for row in rows]
    if all((2 if have_same_scores else 8) * number <= pairs for number, pairs in numbers):
        number, total = map(sum, zip(*numbers, strict=True))
        meaning = f"{number} of {total} detections differ" + ", but not their scores" * have_same_scores
        cause = "After rounding, non-maximum suppression may have kept the other one of two overlapping boxes."
        advice = f"{cause} To make sure, compare AP (--evaluate) or use other images (--parity-images)."
    else:
        meaning = f"the exported model has other detections than the detector, in precision {report['precision']}"
        other = "" if report["precision"] == "fp32" else " or --precision fp32"
        advice = f"Do not use the file, unless AP agrees (--evaluate). Try another --format{other}."
    return [f"NOT EQUAL means that {meaning}. {advice}"]


def describe_report(report: dict) -> str:
    """Format a report of :func:`check_export` as a few lines of text."""
    lines = []
    for row in report["images"]:
        differences = ", ".join(f"{name} {row[name]:.1e}" for name in report["tolerances"] if name in row)
        extra = "".join(f", {row[name]} {name}" for name in ("unmatched", "changed", "borderline") if row[name])
        lines.append(
            "{file}, {height} x {width}: {detections} detections, {detections_exported} exported".format(**row)
            + f"{extra}; largest difference: {differences}{_VERDICTS[row['ok']]}"
        )
    if "score_threshold" in report:
        lines.append("No detection exceeds the score threshold, so the images were compared without a score threshold.")
    lines += _advice(report)
    if not any(row["detections"] or row["detections_exported"] for row in report["images"]):
        lines.append(
            "NOT CHECKED: no detection exceeds the score threshold on these images. Use other images, or lower "
            "SCORE_THRESH_TEST of the detection head."
        )
    for row in report.get("evaluation", ()):
        verdict = f"{'equal' if row['ok'] else 'NOT EQUAL'} within {AP_TOLERANCE}"
        if report["precision"] == "int8":
            verdict = f"{'at most' if row['ok'] else 'MORE THAN'} {AP_DROP:g} lower"
        lines.append(f"{row['dataset']}, {row['task']}: AP {row['AP']}, exported {row['AP_exported']}; {verdict}")
    if operators := report.get("operators"):
        nodes = f"{sum(operators.values())} nodes of {len(operators)} standard operators"
        lines.append(f"{nodes}; passes strict shape inference")
    opset = f", opset {report['opset']}" if report["opset"] else ""
    latency = report["latency"]
    lines.append(
        f"{report['file']}: {report['bytes'] / 1e6:.1f} MB{opset}, {report['precision']}; {report['runtime']}, "
        f"{latency['height']} x {latency['width']}: {latency['exported_ms']:.1f} ms, eager "
        f"{latency['eager_ms']:.1f} ms (medians): {latency['ratio']:.2f} times as fast "
        f"({latency['threads']} thread{'' if latency['threads'] == 1 else 's'})"
    )
    return "\n".join(lines)
