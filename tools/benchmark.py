"""Time a detector beside a baseline, by turns in one process: median seconds and their ratio.

The baseline is detectron2's detector of the same kind with a ResNet-50, or another config of this project.

Example:
    python tools/benchmark.py --config-file configs/retinanet/vil_small_1x.yaml --task backbone
    python tools/benchmark.py --config-file configs/retinanet/vil_tiny_1x.yaml --task training --size 400 672
"""

import argparse
import dataclasses

import torch

from backbones import InputError
from projects_vil import load_config
from projects_vil.analysis import BENCHMARK_TASKS, compare_detectors, resnet50_config
from projects_vil.utils import check_json_path, run_tool, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="the detector")
    parser.add_argument("--baseline", metavar="FILE", help="config to compare with (default: ResNet-50 of detectron2)")
    parser.add_argument(
        "--task", choices=BENCHMARK_TASKS, default="inference", help="what is timed (default inference)"
    )
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"), help="of the images")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="times each is timed (default 7)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    check_json_path(args.json)
    if min(*args.size, args.batch_size, args.runs) < 1:
        raise InputError("--size, --batch-size and --runs are 1 or more")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {args.device}: there is no CUDA device here")
    cfg = load_config(args.config_file)
    baseline = load_config(args.baseline) if args.baseline else resnet50_config(cfg)
    result = compare_detectors(
        cfg,
        baseline,
        task=args.task,
        size=tuple(args.size),
        batch_size=args.batch_size,
        runs=args.runs,
        device=args.device,
    )
    print(
        f"{args.task}, {args.batch_size} x {args.size[0]} x {args.size[1]}, {args.device}: {result.seconds:.3f} s; "
        f"baseline {args.baseline or 'ResNet-50'}: {result.baseline_seconds:.3f} s; "
        f"baseline / detector {result.ratio:.2f} (quartiles {result.low:.2f} to {result.high:.2f}, {args.runs} runs)"
    )
    write_json(args.json, dataclasses.asdict(result))


if __name__ == "__main__":
    run_tool(main)
