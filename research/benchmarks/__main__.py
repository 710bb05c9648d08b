"""Run one benchmark: dataset-check, evaluation, finished-images, growth, predict, predictions, ray-command, reading,
roofline, tar-files or urls.

dataset-check    the check of `vil check`, on synthetic annotations
evaluation       COCO evaluation of synthetic detections
finished-images  the time and memory with which `vil predict --ray` reads the names of finished images
growth           a plot of the JSON file of `vil benchmark`, time and memory by pixels, as PNG or SVG
predict          `vil predict` on synthetic images: single images, batches, bfloat16, shards and Ray workers
predictions      `vil eval --predictions` on synthetic detections, with one and two processes
ray-command      the time and memory of the command `vil predict --ray` on a list, without a model
reading          time and peak memory of reading a large COCO file, and a file of a third of its size
roofline         a lower bound of the time of each model, from the arithmetic and memory rates of the device
tar-files        `vil predict` on tar files without a model: the first run, a resumed run, and the shares of 16 jobs
urls             rate of loading images from a local server that answers each request after 50 ms

Example:
    python -m research.benchmarks evaluation --images 5000
    python -m research.benchmarks dataset-check --images 118287
    python -m research.benchmarks predict output/demo_retinanet --images 160 --batch 8 --runs 3
    python -m research.benchmarks roofline vil_small_rpb lit_s --against swin_t --image-size 512 672 --backward
"""

import argparse
from pathlib import Path

from vil.arguments import ConfigToolParser, output_file, positive, run_tool, write_json

BASE = Path(__file__).resolve().parents[2] / "configs/base/retinanet.yaml"


def evaluation(args: argparse.Namespace) -> None:
    from research.benchmarks.annotations import cost_of_evaluation

    costs = cost_of_evaluation(num_images=args.images, num_detections=100)
    print(f"{costs['seconds']:.2f} s, {_gigabytes(costs['memory'])}, AP {costs['metrics']['AP']:.4f}")
    write_json(args.json, costs)


def dataset_check(args: argparse.Namespace) -> None:
    from research.benchmarks.annotations import time_dataset_check

    cost = time_dataset_check(num_images=args.images)
    size = f"{args.images:,} images, {cost['file_size'] / 1e6:.0f} MB of annotations"
    print(f"{size}: {cost['seconds']:.1f} s, {_gigabytes(cost['memory'])}")
    write_json(args.json, cost)


def predict(args: argparse.Namespace) -> None:
    from research.benchmarks.prediction import format_predictions, measure_predictions

    options = {"num_images": args.images, "batch_size": args.batch, "runs": args.runs}
    options["overrides"] = [word for pair in args.overrides.items() for word in pair]
    rows = measure_predictions(*args.models, **options)
    print(format_predictions(rows))
    write_json(args.json, rows)


def urls(args: argparse.Namespace) -> None:
    from research.benchmarks.prediction import rate_of_urls

    print(f"{rate_of_urls(args.images):.1f} images/s")


def predictions(args: argparse.Namespace) -> None:
    from research.benchmarks.annotations import cost_of_predictions

    for number, (seconds, processor) in cost_of_predictions(num_images=args.images).items():
        print(f"processes: {number}, images/s: {1 / seconds:.0f}, processor time per image: {1000 * processor:.1f} ms")


def reading(args: argparse.Namespace) -> None:
    from research.benchmarks.annotations import cost_of_reading

    rows = cost_of_reading(num_images=args.images)
    for row in rows:
        memory = f"peak {_gigabytes(row['peak'])}, then {_gigabytes(row['memory'])}"
        print(f"{row['purpose']}, {row['images']:,} images: {row['seconds']:.1f} s, {memory}")
    write_json(args.json, rows)


def finished_images(args: argparse.Namespace) -> None:
    from research.benchmarks.prediction import measure_finished_images

    found = measure_finished_images(args.images)
    seconds = f"{found['seconds']:.1f} s, {found['processor_seconds']:.1f} s of its processor time"
    print(f"the command: {seconds}, peak {_gigabytes(found.get('bytes'))}")
    write_json(args.json, found)


def ray_command(args: argparse.Namespace) -> None:
    from research.benchmarks.prediction import measure_ray_command

    costs = measure_ray_command(args.images)
    for name, (seconds, memory) in costs.items():
        print(f"{name}: {seconds:.1f} s of processor time, peak {_gigabytes(memory or None)}")
    write_json(args.json, costs)


def tar_files(args: argparse.Namespace) -> None:
    from research.benchmarks.prediction import measure_tar_files

    costs = measure_tar_files(args.images)
    print(f"{costs['bytes'] / 1e6:.0f} MB: {costs['predict']:.1f} s, resume {costs['resume']:.1f} s", end=", ")
    print(f"reading {costs['read']:.1f} s; largest job: {costs['by_size']:.2f} times the mean", end=", ")
    print(f"with hashed names {costs['by_hash']:.2f}")
    write_json(args.json, costs)


def growth(args: argparse.Namespace) -> None:
    from projects_vil.files import read_json
    from research.benchmarks import plots

    measurements, plot = args.models
    rows = read_json(measurements)["measurements"]
    for name, exponents in plots.growth(rows).items():
        print(f"{name}: {', '.join(f'{what} grows as pixels^{value:.2f}' for what, value in exponents.items())}")
    plots.plot_growth(rows, plot)
    print(f"wrote {plot}")


def roofline(args: argparse.Namespace) -> None:
    from projects_vil.analysis import BenchmarkCase, measure
    from projects_vil.config import choose_device, load_config
    from research.benchmarks import roofline

    cfg = choose_device(load_config(BASE, args.overrides), requested="MODEL.DEVICE" in args.overrides)
    options = {
        **{"part": "backbone", "base": BASE, "size": tuple(args.image_size), "batch_size": args.batch},
        **{"device": cfg.MODEL.DEVICE, "dtype": args.dtype, "backward": args.backward},
    }
    cases = [BenchmarkCase(name, False, **options, overrides=args.overrides) for name in args.models]
    cases += [BenchmarkCase(name, True, **options) for name in args.against]
    rates = roofline.measure_rates(cases[0].device, args.dtype)
    rows = measure(cases, runs=args.runs, memory=False)
    rows = [row | roofline.lower_bound(case.build(), rates) for row, case in zip(rows, cases, strict=True)]
    print(roofline.format_bounds(rows, rates))
    write_json(args.json, {"rates": vars(rates), "measurements": rows})


def _gigabytes(memory: int | None) -> str:
    return "memory not measured (no /proc)" if memory is None else f"{memory / 1e9:.2f} GB"


BENCHMARKS = {"evaluation": evaluation, "dataset-check": dataset_check, "predict": predict, "roofline": roofline}
BENCHMARKS |= {
    "finished-images": finished_images,
    "growth": growth,
    "predictions": predictions,
    "ray-command": ray_command,
    "reading": reading,
    "tar-files": tar_files,
    "urls": urls,
}


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="BENCHMARK", help=", ".join(BENCHMARKS))
    models_help = (
        "predict: a run or an exported model; growth: JSON file, plot; roofline: variants, timm:MODEL or configs"
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=models_help)
    parser.add_argument("--images", type=positive, default=5000, metavar="N", help="synthetic images (default 5000)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="images per batch (default 1)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="timed runs (default 5)")
    group = parser.add_argument_group("roofline")
    group.add_argument("--against", nargs="+", default=[], metavar="NAME", help="r50, swin_t, or models of timm")
    size_help = "image size in pixels (default 800 1344)"
    group.add_argument("--image-size", type=positive, nargs=2, default=(800, 1344), metavar=("H", "W"), help=size_help)
    group.add_argument("--backward", action="store_true", help="include the backward pass")
    dtypes = ("float32", "bfloat16", "float16")
    group.add_argument("--dtype", choices=dtypes, default="float32", help="autocast data type (default float32)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    if args.benchmark == "predict" and len(args.models) != 1:
        parser.error("predict takes one model")
    if args.benchmark == "growth" and len(args.models) != 2:
        parser.error("growth takes a JSON file and the plot to write")
    if args.benchmark == "roofline" and not args.models:
        parser.error("roofline takes one or more models")
    BENCHMARKS[args.benchmark](args)


if __name__ == "__main__":
    run_tool(main)
