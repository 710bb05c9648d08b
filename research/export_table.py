"""Export the demo detectors with every backbone family in every format, and print one table.

The table has a row for each detector, format and precision, with the average precision, latency, file size and peak
memory. The values of the eager detector are in parentheses. The last column is the largest difference between both
detections. Files and reports are in DIR/DETECTOR_FAMILY. If an export fails or differs, the exit status is 1. A
detector has random weights if there is no run DETECTOR_FAMILY in --runs.

Example:
    python -m research.export_table --output output/table --runs output/runs --evaluate --json output/table.json
    python -m research.export_table --output output/table --formats torchscript onnx --families lit --large
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from tabulate import tabulate
from torch import Tensor, nn

from backbones import ConfigError
from projects_vil import load_config
from projects_vil.checkpoint import load_detector
from projects_vil.export import (
    FORMATS,
    ExportedModel,
    check_format,
    eager_detections,
    example_image,
    export_detector,
)
from projects_vil.export.parity import compare_detections, is_equal, measure_latency
from projects_vil.utils import peak_in_new_process
from vil.arguments import ConfigToolParser, output_file, positive, run_tool, write_json
from vil.choices import PRECISIONS

CONFIGS = Path(__file__).parents[1] / "configs/demo"
FAMILIES = ("vil", "ls", "lit", "cvt")
# The families of each detector that have a demo config.
DETECTORS = {"retinanet": FAMILIES, "mask_rcnn": FAMILIES, "cascade_mask_rcnn": ("vil",)}
# Factors for the last layers of an untrained detector.
_FACTORS = {
    "head.cls_score": 60,
    "head.bbox_pred": 20,
    "objectness_logits": 60,
    "anchor_deltas": 20,
    "box_predictor.*cls_score": 60,
    "box_predictor.*bbox_pred": 200,
    "mask_head.predictor": 100,
}


def untrained_detector(cfg: CfgNode) -> nn.Module:
    """Build a detector in eval mode with random weights. Large weights of the predictors make its detections differ."""
    torch.manual_seed(0)
    detector = build_model(cfg).eval()
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            for layer, factor in _FACTORS.items():
                if fnmatchcase(name, f"*{layer}.weight"):
                    parameter *= factor
    return detector


def available_formats() -> list[str]:
    """Return the formats that this machine can write and run."""
    formats = []
    for name in FORMATS:
        with contextlib.suppress(ConfigError):
            check_format(name)
            formats.append(name)
    return formats


def export_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Export the detectors in all formats, compare each file with the eager detector, and print progress to stderr.

    Args:
        args: The arguments of :func:`main`.

    Returns:
        A dict for each export, with ``detector``, ``family``, ``format``, ``precision``, ``trained``, ``seconds`` and
        ``ok``. If the export failed, it has ``error``. Otherwise it has ``images``, ``latency``, ``evaluation`` and
        ``bytes`` of the report, and ``memory``: the peak bytes of ``eager`` and ``exported``, each in a new process
        that loads the model and runs it once. Precisions that a format does not support are skipped.
    """
    pairs = [
        (file_format, precision)
        for file_format in args.formats or available_formats()
        for precision in args.precisions
        if precision in FORMATS[file_format].precisions
    ]
    if not pairs:
        raise ConfigError(f"No format has precision {' or '.join(args.precisions)}. Give other --formats.")
    rows = []
    for detector in args.detectors:
        for family in (family for family in args.families if family in DETECTORS[detector]):
            name = f"{detector}_{family}"
            cfg, weights, trained = _load(name, args)
            for file_format, precision in pairs:
                row = {"detector": detector, "family": family, "format": file_format, "precision": precision}
                row |= {"trained": trained, "ok": False}
                start = time.perf_counter()
                # Exporters raise errors of every type, and a failure must not end the table.
                try:
                    row |= _measure(cfg, weights, Path(args.output, name), row, args)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
                rows.append(row | {"seconds": round(time.perf_counter() - start, 1)})
                result = row.get("error", "equal to eager" if row["ok"] else "NOT EQUAL to eager")
                print(f"{name} {file_format} {precision}: {result}", file=sys.stderr, flush=True)
    return rows


def _load(name: str, args: argparse.Namespace) -> tuple[CfgNode, Path, bool]:
    """Return config and weights of a trained run, or random weights, and whether they are trained."""
    run, on_cpu = Path(args.runs or "", name), args.overrides | {"MODEL.DEVICE": "cpu"}
    if args.runs and (run / "model_final.pth").is_file():
        return load_config(run / "config.yaml", on_cpu), run / "model_final.pth", True
    cfg = load_config(CONFIGS / f"{name}_shapes.yaml", on_cpu)
    weights = Path(args.output, name, "random.pth")
    weights.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": untrained_detector(cfg).state_dict()}, weights)
    return cfg, weights, False


def _measure(cfg: CfgNode, weights: Path, folder: Path, row: dict, args: argparse.Namespace) -> dict[str, Any]:
    options = {"file_format": row["format"], "precision": row["precision"]}
    # pycocotools prints its tables to stdout, where only the table of this program belongs.
    with contextlib.redirect_stdout(sys.stderr):
        path, report = export_detector(cfg, weights, folder, **options, evaluate=args.evaluate and row["trained"])
    images = [example_image(64, 64, seed=5), *([example_image(800, 1333, seed=6)] if args.large else [])]
    images.append(torch.zeros(3, 96, 128, dtype=torch.uint8))
    eager, model = functools.partial(eager_detections, load_detector(cfg, weights)[0]), ExportedModel(path)
    thresholds = model.metadata["thresholds"]
    rows = [compare_detections(eager(image), model(image), row["precision"], thresholds) for image in images]
    rows = report["images"] + rows
    latency = report["latency"]
    if args.image_size:
        latency = measure_latency(eager, model, example_image(*args.image_size, seed=7))
    image = example_image(latency["height"], latency["width"], seed=7)
    # Free two detectors before new processes load another one.
    del eager, model
    builds = {
        "eager": functools.partial(_run_eager, cfg, weights, image),
        "exported": functools.partial(_run_exported, path, image),
    }
    return {
        "ok": is_equal(rows) and all(row["ok"] for row in report.get("evaluation", ())),
        "images": rows,
        "latency": latency,
        "memory": {
            side: peak_in_new_process(build, what=f"{folder.name} {side}", instead="Use a smaller image_size.")
            for side, build in builds.items()
        },
        "evaluation": report.get("evaluation"),
        "bytes": report["bytes"],
    }


def _run_eager(cfg: CfgNode, weights: Path, image: Tensor) -> Callable[[], object]:
    return lambda: eager_detections(load_detector(cfg, weights)[0], image)


def _run_exported(path: Path, image: Tensor) -> Callable[[], object]:
    return lambda: ExportedModel(path)(image)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of :func:`export_table` as a Markdown table, with the values of eager in parentheses."""
    lines = []
    for row in rows:
        line = {"detector": f"{row['detector']} {row['family']}", "format": row["format"]}
        line["precision"] = row["precision"]
        lines.append(line)
        if "error" in row:
            line["difference from eager"] = f"FAILED: {row['error']}"
            continue
        latency, images = row["latency"], row["images"]
        megabytes = {side: "?" if peak is None else f"{peak / 1e6:.0f}" for side, peak in row["memory"].items()}
        aps = [f"{one['task']} {one['AP_exported']} ({one['AP']})" for one in row["evaluation"] or ()]
        names = [name for name in ("boxes", "scores", "masks") if name in images[0]]
        differences = [f"{name} {max(image[name] for image in images):.1e}" for name in names]
        line |= {
            "AP": "; ".join(aps) or "-",
            "ms": f"{latency['exported_ms']:.0f} ({latency['eager_ms']:.0f})",
            "of eager's time": f"{latency['exported_ms'] / latency['eager_ms']:.2f}",
            "MB": f"{row['bytes'] / 1e6:.1f}",
            "peak memory, MB": f"{megabytes['exported']} ({megabytes['eager']})",
            "difference from eager": ", ".join([*([] if row["ok"] else ["NOT EQUAL"]), *differences]),
        }
    return tabulate(lines, headers="keys", tablefmt="github", missingval="-", disable_numparse=True)


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=[])
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the exports")
    parser.add_argument("--runs", metavar="DIR", help="folder with trained runs, DETECTOR_FAMILY/model_final.pth")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=tuple(DETECTORS), help="default: all")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=(), help="default: all supported formats")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=("fp32",), help="default: fp32")
    parser.add_argument("--image-size", nargs=2, type=positive, metavar=("H", "W"), help="size of the timed image")
    parser.add_argument("--evaluate", action="store_true", help="evaluate trained runs on DATASETS.TEST")
    parser.add_argument("--large", action="store_true", help="also compare on an image of 800 x 1333 pixels")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()
    rows = export_table(args)
    print(format_table(rows))
    write_json(args.json, rows)
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    run_tool(main)
