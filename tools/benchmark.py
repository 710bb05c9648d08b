"""Time a detector beside a baseline, by turns in one process: median seconds and their ratio.

The baseline is detectron2's detector of the same kind with a ResNet-50, or another config of this project.
Overrides are the detector's alone: with --baseline of the same file they are what is measured.

Example:
    python tools/benchmark.py --config-file configs/retinanet/vil_small_1x.yaml --task backbone
    python tools/benchmark.py --config-file configs/retinanet/vil_tiny_1x.yaml --task training --size 400 672
    python tools/benchmark.py --config-file configs/retinanet/vil_tiny_1x.yaml --baseline \\
        configs/retinanet/vil_tiny_1x.yaml MODEL.TRANSFORMER.ATTENTION_MODE exact
"""

import dataclasses

from backbones import InputError
from projects_vil import load_config
from projects_vil.analysis import BENCHMARK_TASKS, compare_detectors, resnet50_config
from projects_vil.config import ConfigToolParser, config_of
from projects_vil.utils import check_json_path, run_tool, write_json


def main() -> None:
    parser = ConfigToolParser(__doc__)
    parser.add_argument("--baseline", metavar="FILE", help="config to compare with (default: ResNet-50 of detectron2)")
    parser.add_argument(
        "--task", choices=BENCHMARK_TASKS, default="inference", help="what is timed (default inference)"
    )
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"), help="of the images")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--runs", type=int, default=7, metavar="N", help="times each is timed (default 7)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    check_json_path(args.json)
    if min(*args.size, args.batch_size, args.runs) < 1:
        raise InputError("--size, --batch-size and --runs are 1 or more")
    cfg = config_of(args)
    baseline = load_config(args.baseline) if args.baseline else resnet50_config(cfg)
    result = compare_detectors(
        cfg,
        baseline,
        task=args.task,
        size=tuple(args.size),
        batch_size=args.batch_size,
        runs=args.runs,
        device=cfg.MODEL.DEVICE,
    )
    print(
        f"{args.task}, {args.batch_size} x {args.size[0]} x {args.size[1]}, {result.device}: {result.seconds:.3f} s; "
        f"baseline {args.baseline or 'ResNet-50'}: {result.baseline_seconds:.3f} s; "
        f"baseline / detector {result.ratio:.2f} (quartiles {result.low:.2f} to {result.high:.2f}, {args.runs} runs)"
    )
    write_json(args.json, dataclasses.asdict(result))


if __name__ == "__main__":
    run_tool(main)
