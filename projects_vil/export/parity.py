"""The parity check of an export: its detections are paired with detectron2's, and their differences measured.

:func:`check_export` makes the report next to the file, :func:`describe_report` prints it.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from projects_vil.checkpoint import fingerprint
from projects_vil.data import build_test_loader
from projects_vil.evaluation import build_evaluator
from projects_vil.export.formats import FORMATS, check_onnx
from projects_vil.export.runtime import ExportedModel

# The largest differences that count as equal: boxes in pixels, scores and masks in probability. In lower precision they
# are those that the rounding of the network causes.
TOLERANCES = {
    "fp32": {"boxes": 1e-2, "scores": 1e-4, "masks": 1e-3},
    "fp16": {"boxes": 1.0, "scores": 2e-2, "masks": 5e-2},
    "bf16": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
    "int8": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
}
# The share of an image's detections that may differ by more: rounding makes non-maximum suppression keep the other of
# two candidates that are nearly equal. None: int8 is evaluated by average precision, not by pairs.
CHANGED_SHARE = {"fp32": 0.0, "fp16": 0.1, "bf16": 0.1, "int8": None}
# How near a score is to the threshold, or to the end of a full list, for a detection to be on one side only.
BORDERLINE = TOLERANCES["fp32"]["scores"]
# The largest difference of average precision, in points, that counts as equal; and how much lower it may be in int8.
AP_TOLERANCE, AP_DROP = 0.1, 1.0
Outputs = Mapping[str, Tensor]
DetectFn = Callable[[Tensor], Outputs]
_VERDICTS = {True: "; equal", False: "; NOT EQUAL", None: ""}


# -- pairs of detections ---------------------------------------------------------------------------


def compare(
    reference: DetectFn, exported: DetectFn, images: Sequence[Tensor], precision: str, thresholds: Mapping[str, float]
) -> list[dict]:
    """Run both on each image (3, H, W), see :func:`compare_detections`, and add the image's height and width."""
    return [
        {"height": image.shape[-2], "width": image.shape[-1]}
        | compare_detections(reference(image), exported(image), precision, thresholds)
        for image in images
    ]


def compare_detections(ours: Outputs, theirs: Outputs, precision: str, thresholds: Mapping[str, float]) -> dict:
    """Measure how far two results for one image are apart.

    Detections are paired by class and box, not by their rank: two scores that differ in the last digit change their
    order in another runtime. A detection without a partner is borderline, and not an error, if its score is within
    ``BORDERLINE`` of the threshold or, in a full list, of its lowest score.

    Args:
        ours, theirs: boxes (D, 4), scores (D,), classes (D,), and masks (D, 1, S, S) or none.
        precision: a key of ``TOLERANCES`` and ``CHANGED_SHARE``.
        thresholds: those of the metadata: ``score``, and ``detections_per_image``, negative for any number.

    Returns:
        ``detections`` and ``detections_exported``; ``pairs`` of them; ``unmatched``, those without a partner of their
        class, except for borderline ones; ``borderline``, their number; ``changed``, pairs that differ by more than a
        tolerance; the largest difference of boxes, scores and masks in the pairs; ``ok``, None if they do not decide.
    """
    tolerances, changed_share = TOLERANCES[precision], CHANGED_SHARE[precision]
    distance = (ours["boxes"].float()[:, None] - theirs["boxes"].float()).abs().amax(2)
    # NaN matches nothing.
    distance = distance.nan_to_num(nan=torch.inf)
    distance = distance.masked_fill(ours["classes"][:, None] != theirs["classes"], torch.inf)
    pairs = _pair(distance, at_most=tolerances["boxes"])
    borderline = 0
    # Unmatched detections that are not borderline should have been pairs: pair them too, to report their distance.
    rest = [torch.ones(side, dtype=torch.bool) for side in distance.shape]
    for axis, scores in enumerate((ours["scores"], theirs["scores"])):
        rest[axis][[pair[axis] for pair in pairs]] = False
        near = rest[axis] & _is_borderline(scores, thresholds)
        borderline += int(near.sum())
        rest[axis] &= ~near
    is_open = rest[0][:, None] & rest[1]
    far = _pair(distance.masked_fill(~is_open, torch.inf), at_most=torch.finfo(torch.float32).max)
    pairs += far
    row: dict = {
        "detections": len(ours["scores"]),
        "detections_exported": len(theirs["scores"]),
        "pairs": len(pairs),
        "unmatched": int(rest[0].sum() + rest[1].sum()) - 2 * len(far),
        "borderline": borderline,
    }
    mine, other = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
    within = torch.ones(len(pairs), dtype=torch.bool)
    for name in tolerances:
        if name in ours:
            difference = (ours[name][mine].float() - theirs[name][other].float()).abs()
            row[name] = difference.max().item() if difference.numel() else 0.0
            within &= (difference <= tolerances[name]).view(len(pairs), *difference.shape[1:], 1).flatten(1).all(1)
    row["changed"] = int((~within).sum())
    wrong = row["unmatched"] + row["changed"]
    row["ok"] = None if changed_share is None else wrong <= changed_share * row["detections"]
    return row


def _pair(distance: Tensor, *, at_most: float) -> list[tuple[int, int]]:
    """Return the nearest free partner of each row, in their order: (row, column)."""
    free, pairs = distance.clone(), []
    for row in range(len(free)):
        if free.shape[1] and free[row].min() <= at_most:
            column = int(free[row].argmin())
            pairs.append((row, column))
            free[:, column] = torch.inf
    return pairs


def _is_borderline(scores: Tensor, thresholds: Mapping[str, float]) -> Tensor:
    is_borderline = scores <= thresholds["score"] + BORDERLINE
    if 0 < thresholds["detections_per_image"] <= len(scores):
        is_borderline |= scores <= scores.min() + BORDERLINE
    return is_borderline


def eager_detections(detector: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Return what detectron2's own code finds in an image (3, H, W), by the names of an exported model.

    Masks are (N, 1, S, S), relative to their boxes; boxes without an area are left out, as in its last step.
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
    """Return median milliseconds of both on one image, interleaved, and their ratio: above 1 the export is faster."""
    times: list[list[float]] = [[], []]
    for _ in range(1 + 5):
        for detector, own in zip((reference, exported), times, strict=True):
            start = time.perf_counter()
            detector(image)
            own.append(1000 * (time.perf_counter() - start))
    eager, ours = (statistics.median(own[1:]) for own in times)  # the first is a warm-up
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
    images: Sequence[Tensor],
    *,
    evaluate: bool = False,
    accept_drop: bool = False,
) -> dict:
    """Compare an exported model with the detector that it was made from; docs/export.md describes the report.

    Args:
        evaluate: whether to evaluate both on ``DATASETS.TEST`` too.
        accept_drop: whether average precision may be lower by any number.

    Raises:
        ConfigError: for an ONNX file that other programs would refuse, see
            :func:`projects_vil.export.formats.check_onnx`.
    """
    precision, thresholds = model.metadata["precision"], model.metadata["thresholds"]
    eager = functools.partial(eager_detections, reference)

    def run(image: Tensor) -> Outputs:
        return model.run_each([image])[0]

    callables = [functools.partial(_run_in_batch, model, index) for index in (0, 1)] if model.batched else [run]
    rows = [row for exported in callables for row in compare(eager, exported, images, precision, thresholds)]
    report = {
        "file": model.path.name,
        "format": model.file_format,
        "opset": model.metadata["opset"],
        "precision": precision,
        "bytes": sum(file.stat().st_size for file in FORMATS[model.file_format].files(model.path)),
        "tolerances": TOLERANCES[precision],
        "changed_share": CHANGED_SHARE[precision],
        "images": rows,
        "latency": measure_latency(eager, run, images[0]),
        "versions": model.metadata["versions"],
        "fingerprint": fingerprint(cfg, reference),
        "accept_drop": accept_drop,
    }
    if model.file_format == "onnx":
        report["onnx"] = check_onnx(model.path)
    if precision == "int8":
        found = [torch.cat([detect(image)["scores"] for image in images]) for detect in (eager, run)]
        report["scores"] = [
            {"distinct": len(one.unique()), "highest": one.amax().item() if len(one) else None} for one in found
        ]
    if evaluate:
        report["evaluation"] = _evaluate(cfg, reference, model)
    is_as_good = [row["ok"] or (accept_drop and bool(row["AP_exported"])) for row in report.get("evaluation", ())]
    report["ok"] = is_equal(rows) and all(is_as_good)
    return report


def is_equal(rows: Sequence[dict]) -> bool:
    """Return whether the rows of :func:`compare` have pairs, and all rows are ``ok``."""
    return any(row["pairs"] for row in rows) and all(row["ok"] is not False for row in rows)


def _run_in_batch(model: ExportedModel, index: int, image: Tensor) -> dict[str, Tensor]:
    """Return what a batched model finds in the image at ``index`` of two; the other one is its mirror image."""
    images = [image.flip(2), image.flip(2)]
    images[index] = image
    return model.run_each(images)[index]


def _evaluate(cfg: CfgNode, reference: nn.Module, model: ExportedModel) -> list[dict]:
    """Return the average precision of both, for each test set and task, by detectron2's evaluator."""
    rows = []
    for name in cfg.DATASETS.TEST:
        results = []
        for detector in (reference, model.as_detectron2):
            evaluator = build_evaluator(cfg, name, None)
            results.append(inference_on_dataset(detector, build_test_loader(cfg, name), evaluator))
        for task in results[0]:
            eager, exported = (float(result[task]["AP"]) for result in results)
            if model.metadata["precision"] == "int8":
                # A detector without detections shows nothing about its export.
                is_ok = eager > 0 and eager - exported <= AP_DROP
            else:
                is_ok = abs(eager - exported) <= AP_TOLERANCE or (math.isnan(eager) and math.isnan(exported))
            precisions = {"AP": _number(eager), "AP_exported": _number(exported)}
            rows.append({"dataset": name, "task": task, **precisions, "ok": is_ok})
    return rows


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def describe_report(report: dict) -> str:
    """Return a report of :func:`check_export` as a few lines."""
    lines = []
    for row in report["images"]:
        differences = ", ".join(f"{name} {row[name]:.1e}" for name in report["tolerances"] if name in row)
        extra = "".join(f", {row[name]} {name}" for name in ("unmatched", "changed", "borderline") if row[name])
        lines.append(
            f"{row['height']} x {row['width']}: {row['detections']} detections, {row['detections_exported']} exported"
            f"{extra}; largest difference: {differences}{_VERDICTS[row['ok']]}"
        )
    if not any(row["detections"] or row["detections_exported"] for row in report["images"]):
        lines.append(
            "NOT CHECKED: there are no detections above the score threshold on these images: name others "
            "by --images, or lower SCORE_THRESH_TEST of the detector's head"
        )
    for row in report.get("evaluation", ()):
        verdict = f"{'equal' if row['ok'] else 'NOT EQUAL'} within {AP_TOLERANCE}"
        if report["precision"] == "int8":
            verdict = f"{'at most' if row['ok'] else 'MORE THAN'} {AP_DROP:g} lower"
        lines.append(f"{row['dataset']}, {row['task']}: AP {row['AP']}, exported {row['AP_exported']}; {verdict}")
    if "onnx" in report:
        operators = report["onnx"]["operators"]
        lines.append(
            f"{sum(operators.values())} nodes of {len(operators)} standard operators; valid in strict shape inference; "
            f"loads with {', '.join(report['onnx']['providers'])}"
        )
    for side, one in zip(("eager", "exported"), report.get("scores", ()), strict=False):
        highest = "none" if one["highest"] is None else f"{one['highest']:.3f}"
        lines.append(f"{side}: {one['distinct']} distinct scores, the highest {highest}")
    opset = f", opset {report['opset']}" if report["opset"] else ""
    latency = report["latency"]
    lines.append(
        f"{report['file']}: {report['bytes'] / 1e6:.1f} MB{opset}, {report['precision']}; "
        f"{latency['height']} x {latency['width']}: {latency['exported_ms']:.1f} ms, eager "
        f"{latency['eager_ms']:.1f} ms, medians: {latency['ratio']:.2f} times as fast "
        f"({latency['threads']} thread{'' if latency['threads'] == 1 else 's'})"
    )
    return "\n".join(lines)
