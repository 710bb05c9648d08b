"""Export the demo detectors with every backbone family in every format, and print one table.

It has a row for each detector, format and precision: average precision, latency, size and peak memory of one file, each
with eager's in brackets, and the largest difference from eager's detections. Files and reports are in
DIR/DETECTOR_FAMILY. The exit status is 1 where an export failed or differs. Weights are random where --runs has no run
DETECTOR_FAMILY.

Example:
    python -m research.export_table --output output/table --runs output/runs --evaluate --json output/table.json
    python -m research.export_table --output output/table --formats torchscript onnx --families lit --large
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.arguments import ConfigToolParser, output_file, positive, run_tool, write_json

if TYPE_CHECKING:
    from detectron2.config import CfgNode
    from torch import Tensor, nn

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


def untrained_detector(cfg: "CfgNode") -> "nn.Module":
    """Build a detector in eval mode with random weights and large predictors, whose scores and boxes differ widely."""
    import torch
    from detectron2.modeling import build_model

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
    from backbones.errors import ConfigError
    from projects_vil.export import FORMATS, check_format

    found = []
    for name in FORMATS:
        with contextlib.suppress(ConfigError):
            check_format(name)
            found.append(name)
    return found


def export_table(
    output: str | Path,
    *,
    runs: str | Path | None = None,
    detectors: Sequence[str] = tuple(DETECTORS),
    families: Sequence[str] = FAMILIES,
    formats: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32",),
    image_size: tuple[int, int] | None = None,
    large: bool = False,
    evaluate: bool = False,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Export the detectors in all formats and compare each file with eager; progress goes to stderr.

    Args:
        output: folder for the exports.
        runs: folder with trained runs, each in ``DETECTOR_FAMILY``; random weights where there is none.
        formats: of ``projects_vil.export.FORMATS``; empty for :func:`available_formats`.
        image_size: height and width of the image that is timed; None for that of testing.
        large: whether to compare on an image of 800 x 1333 too.
        evaluate: whether to evaluate file and eager on ``DATASETS.TEST``, where there is a trained run.
        overrides: keys and values for all configs.

    Returns:
        For each export a dict with ``detector``, ``family``, ``format``, ``precision``, ``trained``, ``seconds`` and
        ``ok``; ``error`` where it failed, else ``images``, ``latency``, ``evaluation`` and ``bytes`` of the export's
        report, and ``memory``: of ``eager`` and ``exported``, bytes at the peak of a new process that loads it and runs
        once. A format without a precision is left out.
    """
    from backbones.errors import ConfigError
    from projects_vil.export import check_precision

    pairs = []
    for file_format in formats or available_formats():
        for precision in precisions:
            try:
                check_precision(file_format, precision)
                pairs.append((file_format, precision))
            except ConfigError as error:
                print(f"left out: {error}", file=sys.stderr)
    rows = []
    for detector in detectors:
        for family in (family for family in families if family in DETECTORS[detector]):
            name = f"{detector}_{family}"
            folder = Path(output, name)
            folder.mkdir(parents=True, exist_ok=True)
            cfg, weights, trained = _load(folder, None if runs is None else Path(runs, name), name, overrides)
            measure = functools.partial(
                _measure, cfg, weights, folder, image_size=image_size, large=large, evaluate=evaluate and trained
            )
            for file_format, precision in pairs:
                row = {"detector": detector, "family": family, "format": file_format, "precision": precision}
                start = time.perf_counter()
                try:
                    row |= {"trained": trained, **measure(file_format, precision)}
                # Exporters raise errors of every type, and a failure must not end the table.
                except Exception as error:
                    row |= {
                        "trained": trained,
                        "ok": False,
                        "error": f"{type(error).__name__}: {error}".splitlines()[0],
                    }
                rows.append(row | {"seconds": round(time.perf_counter() - start, 1)})
                result = rows[-1].get("error", "equal to eager" if rows[-1]["ok"] else "NOT EQUAL to eager")
                print(f"{name} {file_format} {precision}: {result}", file=sys.stderr, flush=True)
    return rows


def _load(folder: Path, run: Path | None, name: str, overrides: Sequence[str]) -> tuple["CfgNode", Path, bool]:
    """Return config and weights of a trained run, or random weights, and whether they are trained."""
    import torch

    from projects_vil import load_config

    if run is not None and (run / "model_final.pth").is_file():
        return load_config(run / "config.yaml", overrides), run / "model_final.pth", True
    cfg = load_config(CONFIGS / f"{name}_shapes.yaml", [*overrides, "MODEL.DEVICE", "cpu"])
    torch.save({"model": untrained_detector(cfg).state_dict()}, folder / "random.pth")
    return cfg, folder / "random.pth", False


def _measure(
    cfg: "CfgNode",
    weights: Path,
    folder: Path,
    file_format: str,
    precision: str,
    *,
    image_size: tuple[int, int] | None,
    large: bool,
    evaluate: bool,
) -> dict[str, Any]:
    import torch

    from projects_vil.checkpoint import build_detector
    from projects_vil.export import (
        ExportedModel,
        compare,
        eager_detections,
        example_image,
        export_detector,
        is_equal,
        measure_latency,
    )
    from projects_vil.utils import peak_in_new_process

    # pycocotools prints its tables where this one is to be printed.
    with contextlib.redirect_stdout(sys.stderr):
        path, report = export_detector(
            cfg, weights, folder, file_format=file_format, precision=precision, evaluate=evaluate
        )
    images = [example_image(64, 64, seed=5), *([example_image(800, 1333, seed=6)] if large else [])]
    images.append(torch.zeros(3, 96, 128, dtype=torch.uint8))
    eager, model = functools.partial(eager_detections, build_detector(cfg, weights)), ExportedModel(path)
    thresholds = model.metadata["thresholds"]
    options = {"score_threshold": thresholds["score"], "max_detections": thresholds["detections_per_image"]}
    rows = report["images"] + compare(eager, model, images, precision=precision, **options)
    latency = report["latency"]
    if image_size is not None:
        latency = measure_latency(eager, model, example_image(*image_size, seed=7))
    image = example_image(latency["height"], latency["width"], seed=7)
    # Two detectors less, before processes that hold one more.
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
            side: peak_in_new_process(build, what=f"{folder.name} {side}", instead="use a smaller image_size")
            for side, build in builds.items()
        },
        "evaluation": report.get("evaluation"),
        "bytes": report["bytes"],
    }


def _run_eager(cfg: "CfgNode", weights: Path, image: "Tensor") -> Callable[[], object]:
    from projects_vil.checkpoint import build_detector
    from projects_vil.export import eager_detections

    return lambda: eager_detections(build_detector(cfg, weights), image)


def _run_exported(path: Path, image: "Tensor") -> Callable[[], object]:
    from projects_vil.export import ExportedModel

    return lambda: ExportedModel(path)(image)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of :func:`export_table` as a Markdown table, eager's figures in brackets."""
    from tabulate import tabulate

    lines = []
    for row in rows:
        line = {
            "detector": f"{row['detector']} {row['family']}",
            "format": row["format"],
            "precision": row["precision"],
        }
        if "error" in row:
            lines.append(line | {"difference from eager": f"FAILED: {row['error']}"})
            continue
        latency, images = row["latency"], row["images"]
        megabytes = {side: "?" if peak is None else f"{peak / 1e6:.0f}" for side, peak in row["memory"].items()}
        aps = [f"{one['task']} {one['AP_exported']} ({one['AP']})" for one in row["evaluation"] or ()]
        differences = [
            f"{name} {max(image[name] for image in images):.1e}"
            for name in ("boxes", "scores", "masks")
            if name in images[0]
        ]
        lines.append(
            line
            | {
                "AP": "; ".join(aps) or "-",
                "ms": f"{latency['exported_ms']:.0f} ({latency['eager_ms']:.0f})",
                "of eager's time": f"{latency['exported_ms'] / latency['eager_ms']:.2f}",
                "MB": f"{row['bytes'] / 1e6:.1f}",
                "peak memory, MB": f"{megabytes['exported']} ({megabytes['eager']})",
                "difference from eager": ", ".join([*([] if row["ok"] else ["NOT EQUAL"]), *differences]),
            }
        )
    return tabulate(lines, headers="keys", tablefmt="github", missingval="-", disable_numparse=True)


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=[])
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the exports")
    parser.add_argument("--runs", metavar="DIR", help="folder with trained runs, DETECTOR_FAMILY/model_final.pth")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=tuple(DETECTORS), help="default: all")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--formats", nargs="+", default=(), metavar="FORMAT", help="default: all that work here")
    parser.add_argument("--precisions", nargs="+", default=("fp32",), metavar="P", help="default: fp32")
    parser.add_argument("--image-size", nargs=2, type=positive, metavar=("H", "W"), help="of the timed image")
    parser.add_argument("--evaluate", action="store_true", help="average precision of trained runs on DATASETS.TEST")
    parser.add_argument("--large", action="store_true", help="compare on 800 x 1333 too")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures there too")
    args = parser.parse_args()
    rows = export_table(
        args.output,
        runs=args.runs,
        detectors=args.detectors,
        families=args.families,
        formats=args.formats,
        precisions=args.precisions,
        image_size=args.image_size and tuple(args.image_size),
        large=args.large,
        evaluate=args.evaluate,
        overrides=args.opts,
    )
    print(format_table(rows))
    write_json(args.json, rows)
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    run_tool(main)
