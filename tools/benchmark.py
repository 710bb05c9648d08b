"""Measure time and memory of models: interleaved in one process, medians and quartiles.

Models are variants, timm:MODEL or config files. After a name, +checkpointing is activation checkpointing, +shift
random-shift training, and +sdpa and +triton are attention backends. --against names baselines: r50 and swin_t of
detectron2, or models of timm; ratios are to the first of them, or to the first model. Several --size are a sweep, with
the exponents of pixels that time and memory grow by. --limits shows what limits a model: arithmetic, memory, or the
number of calls of its operators. Overrides of config keys are for the models, not for the baselines.

--what coco-api measures an evaluation by pycocotools and by faster-coco-eval, once each in a new process, --what
dataset-check the check of tools/check_dataset.py; both generate --images annotated images of 7 objects each. --what
predict measures vil predict with the detector that --models names, a run's folder or an exported file, on --images
drawn photos: one at a time, in batches of --batch-size, in bfloat16, in two shards, and by two Ray workers.

Example:
    python tools/benchmark.py --what backbone --models vil_tiny_rpb vil_small_rpb --against swin_t --size 800 1344
    python tools/benchmark.py --what backbone --backward --models vil_small_rpb vil_small_rpb+shift --against swin_t \\
        --size 512 672
    python tools/benchmark.py --what train-step --detector mask_rcnn --models vil_small_rpb --against r50 swin_t \\
        --size 512 672 --batch-size 2 --json step.json
    python tools/benchmark.py --what attention --models vil_small_rpb full_small --size 400 672 --size 800 1344 \\
        --plot growth.png
    python tools/benchmark.py --models vil_small_rpb lit_s --against swin_t --size 512 672 --backward --limits
    python tools/benchmark.py --what coco-api --images 5000
    python tools/benchmark.py --what dataset-check --images 118287
    python tools/benchmark.py --what predict --models output/demo_retinanet --images 160 --batch-size 8 --runs 3
"""

import argparse
from pathlib import Path

from vil.arguments import ConfigToolParser, config_of, output_file, positive, run_tool, write_json

BASE = Path(__file__).resolve().parents[1] / "configs/base"
MODELS = ("attention", "backbone", "detector", "train-step")
WHAT = (*MODELS, "coco-api", "dataset-check", "predict")
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    parser.add_argument("--what", choices=WHAT, default="backbone", help="what to measure (default backbone)")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME", help="variants, timm:MODEL or configs")
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME", help="r50, swin_t, or models of timm")
    detectors = ("retinanet", "mask_rcnn")
    parser.add_argument("--detector", choices=detectors, default=detectors[0], help="of variants (default retinanet)")
    parser.add_argument("--backward", action="store_true", help="measure gradients of attention and backbones too")
    size = {"type": positive, "nargs": 2, "action": "append", "metavar": ("H", "W")}
    parser.add_argument("--size", **size, help="pixels, once or more often (default 800 1344)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images of a batch (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="data type, by autocast (default float32)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="timed runs of each model (default 5)")
    parser.add_argument("--images", type=positive, default=5000, metavar="N", help="generated images (default 5000)")
    parser.add_argument("--no-memory", action="store_true", help="measure time only, which is faster on a CPU")
    parser.add_argument("--limits", action="store_true", help="report what limits each model on this device")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there too")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="plot against pixels, .png or .svg")
    args = parser.parse_args()
    if args.what in (*MODELS, "predict") and not args.models:
        parser.error(f"--what {args.what} needs --models")
    if args.what == "predict" and len(args.models) > 1:
        parser.error(f"argument --models: --what predict takes one detector, not {' '.join(args.models)}")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg"):
        parser.error(f"argument --plot: {args.plot} does not end in .png or .svg")
    others = {"coco-api": measure_coco_apis, "dataset-check": measure_dataset_check, "predict": measure_prediction}
    others.get(args.what, measure_models)(args)


def measure_models(args: argparse.Namespace) -> None:
    from projects_vil import analysis

    args.config_file = BASE / f"{args.detector}.yaml"
    options = {
        **{"part": args.what, "base": args.config_file, "batch_size": args.batch_size, "backward": args.backward},
        **{"device": config_of(args).MODEL.DEVICE, "dtype": args.dtype, "overrides": tuple(args.opts)},
    }
    names = [(name, False) for name in args.models] + [(name, True) for name in args.against]
    reference = len(args.models) if args.against else 0
    rows, rates = [], None
    for size in args.size or [(800, 1344)]:
        cases = [analysis.BenchmarkCase(*name, size=tuple(size), **options) for name in names]
        measured = analysis.measure(cases, reference=reference, runs=args.runs, memory=not args.no_memory)
        if args.limits:
            rates = rates or analysis.measure_rates(cases[0].device, args.dtype)
            measured = [row | analysis.roofline(case.build(), rates) for row, case in zip(measured, cases, strict=True)]
        rows += measured
    content = {"measurements": rows, "growth": analysis.growth(rows)}
    print(analysis.format_measurements(rows, reference=names[reference][0]))
    if rates:
        print(f"\n{analysis.format_limits(rows, rates)}")
        content["rates"] = vars(rates)
    write_json(args.json, content)
    if args.plot:
        analysis.plot_measurements(rows, args.plot)


def measure_coco_apis(args: argparse.Namespace) -> None:
    from projects_vil.analysis import compare_coco_apis

    compared = compare_coco_apis(num_images=args.images, num_detections=100)
    seconds, memory, metrics = compared["seconds"], compared["memory"], compared["metrics"]
    for api, duration in seconds.items():
        peak = "memory not measured (no /proc)" if memory[api] is None else f"{memory[api] / 1e9:.2f} GB"
        print(f"{api}: {duration:.2f} s, {peak}, AP {metrics[api]['AP']:.4f}")
    reference, api = seconds
    most = max(abs(metrics[api][name] - value) for name, value in metrics[reference].items() if value == value)
    share = seconds[api] / seconds[reference]
    print(f"{api} takes {share:.3f} of {reference}'s time; metrics differ by at most {most:.1e}")
    write_json(args.json, compared)


def measure_dataset_check(args: argparse.Namespace) -> None:
    from projects_vil.analysis import time_dataset_check

    cost = time_dataset_check(num_images=args.images)
    memory = "memory not measured (no /proc)" if cost["memory"] is None else f"{cost['memory'] / 1e9:.2f} GB"
    size = cost["file_size"] / 1e6
    print(f"{args.images:,} images, {size:.0f} MB of annotations: {cost['seconds']:.1f} s, {memory}")
    write_json(args.json, cost)


def measure_prediction(args: argparse.Namespace) -> None:
    from projects_vil.analysis import format_predictions, measure_predictions

    options = {"num_images": args.images, "batch_size": args.batch_size, "runs": args.runs, "overrides": args.opts}
    rows = measure_predictions(*args.models, **options)
    print(format_predictions(rows))
    write_json(args.json, rows)


if __name__ == "__main__":
    run_tool(main)
