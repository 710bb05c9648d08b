"""The proof of an export: its answers beside those of the detector that it was made of."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import inference_on_dataset
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from projects_vil.checkpoint import fingerprint
from projects_vil.data import build_test_loader
from projects_vil.evaluation import build_evaluator
from projects_vil.export.formats import FORMATS
from projects_vil.export.proof.parity import CHANGED_SHARE, TOLERANCES, compare, describe, measure_latency
from projects_vil.export.runtime import ExportedDetector, ExportedModel

# The largest difference of average precision, in points, that counts as the same.
AP_TOLERANCE = 0.1
# How much lower it may be in int8.
AP_DROP = 1.0


def eager_detections(detector: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What detectron2's own code finds in an image (3, H, W), by the names of an exported model.

    Masks are (N, 1, S, S), in the frame of their boxes; boxes without an area are left out, as in its last step.
    """
    batch = [{"image": image}]
    with torch.no_grad():
        if isinstance(detector, GeneralizedRCNN):
            instances = detector.inference(batch, do_postprocess=False)[0]
        else:
            instances = detector(batch)[0]["instances"]
    instances = instances[instances.pred_boxes.nonempty()]
    found = {
        "boxes": instances.pred_boxes.tensor,
        "scores": instances.scores,
        "classes": instances.pred_classes,
    }
    return found | {"masks": instances.pred_masks} if instances.has("pred_masks") else found


def report_path(path: str | Path) -> Path:
    """Where the report of an exported file stands."""
    return Path(f"{path}.report.json")


def check_export(
    cfg: CfgNode,
    reference: nn.Module,
    model: ExportedModel,
    images: Sequence[Tensor],
    *,
    runs: int = 5,
    evaluate: bool = False,
    accept_drop: bool = False,
) -> dict:
    """Compare an exported model with the detector that it was made of; see :func:`describe_report`.

    Args:
        accept_drop: whether average precision may be lower by any number.

    Raises:
        InputError: for a file that other programs would refuse, see :class:`projects_vil.export.formats.Format`.
    """
    facts = FORMATS[model.file_format].describe(model.path)
    precision, thresholds = model.metadata["precision"], model.metadata["thresholds"]
    eager = functools.partial(eager_detections, reference)
    ways: list[Callable[[Tensor], dict[str, Tensor]]] = [model]
    if model.batched:
        ways = [functools.partial(_one_of_two, model, index) for index in (0, 1)]
    rows = []
    for exported in ways:
        rows += compare(
            eager,
            exported,
            images,
            tolerances=TOLERANCES[precision],
            score_threshold=thresholds["score"],
            max_detections=thresholds["detections_per_image"],
            changed_share=CHANGED_SHARE[precision],
        )
    report = {
        "file": model.path.name,
        "format": model.file_format,
        "opset": model.metadata["opset"],
        "precision": precision,
        "bytes": sum(file.stat().st_size for file in FORMATS[model.file_format].files(model.path)),
        "tolerances": TOLERANCES[precision],
        "changed_share": CHANGED_SHARE[precision],
        "images": rows,
        "latency": measure_latency(eager, _one_image(model), images[0], runs=runs),
        "versions": model.metadata["versions"],
        "fingerprint": fingerprint(cfg, reference),
    } | facts
    if evaluate:
        report["evaluation"] = _evaluate(cfg, reference, model)
    judged = [row["ok"] or (accept_drop and bool(row["AP_exported"])) for row in report.get("evaluation", ())]
    report["ok"] = describe(rows, TOLERANCES[precision])[1] and all(judged)
    return report


def _one_image(model: ExportedModel) -> Callable[[Tensor], dict[str, Tensor]]:
    return (lambda image: model(image[None])) if model.batched else model


def _one_of_two(model: ExportedModel, index: int, image: Tensor) -> dict[str, Tensor]:
    """What a batched model finds in the image at ``index`` of two; the other one is its mirror image."""
    images = [image.flip(2), image.flip(2)]
    images[index] = image
    found = model(torch.stack(images))
    return {name: value[found["image_index"] == index] for name, value in found.items()}


def _evaluate(cfg: CfgNode, reference: nn.Module, model: ExportedModel) -> list[dict]:
    """Average precision of both, for each test set and task, by detectron2's evaluator."""
    rows = []
    for name in cfg.DATASETS.TEST:
        results = []
        for detector in (reference, ExportedDetector(model).eval()):
            evaluator = build_evaluator(cfg, name, None)
            results.append(inference_on_dataset(detector, build_test_loader(cfg, name), evaluator))
        for task in results[0]:
            eager, exported = (float(result[task]["AP"]) for result in results)
            if model.metadata["precision"] == "int8":
                # A detector that finds nothing proves nothing.
                is_ok = eager > 0 and eager - exported <= AP_DROP
            else:
                is_ok = abs(eager - exported) <= AP_TOLERANCE or (math.isnan(eager) and math.isnan(exported))
            rows.append(
                {"dataset": name, "task": task, "AP": _number(eager), "AP_exported": _number(exported), "ok": is_ok}
            )
    return rows


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _judgement(row: dict, precision: str) -> str:
    if precision != "int8":
        return f"{'equal' if row['ok'] else 'NOT EQUAL'} to {AP_TOLERANCE}"
    if not row["AP"]:
        return "NOT PROVEN: nothing was found before"
    return f"{'at most' if row['ok'] else 'MORE THAN'} {AP_DROP:g} lower"


def describe_report(report: dict) -> str:
    """A report of :func:`check_export` as a few lines."""
    latency = report["latency"]
    lines = [describe(report["images"], report["tolerances"])[0]]
    for row in report.get("evaluation", ()):
        lines.append(
            f"{row['dataset']}, {row['task']}: AP {row['AP']}, exported {row['AP_exported']}; "
            f"{_judgement(row, report['precision'])}"
        )
    opset = f", opset {report['opset']}" if report["opset"] else ""
    if "onnx" in report:
        operators = report["onnx"]["operators"]
        lines.append(
            f"{sum(operators.values())} nodes of {len(operators)} standard operators, valid to the last shape; "
            f"loads with {', '.join(report['onnx']['providers'])}"
        )
        tensorrt = report["onnx"]["tensorrt"]
        if tensorrt["undocumented"]:
            lines.append(f"not documented by TensorRT {tensorrt['version']}: {', '.join(tensorrt['undocumented'])}")
    lines.append(
        f"{report['file']}: {report['bytes'] / 1e6:.1f} MB{opset}, {report['precision']}; "
        f"{latency['height']} x {latency['width']}: {latency['exported_ms']:.1f} ms, eager "
        f"{latency['eager_ms']:.1f} ms, medians: {latency['ratio']:.2f} times as fast ({latency['threads']} threads)"
    )
    return "\n".join(lines)
