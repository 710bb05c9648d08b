"""Measure the time and memory of models. All models run interleaved in one process; results are medians with quartiles.

A model is a variant, timm:MODEL or a config file. Suffixes change it: +checkpointing uses activation checkpointing,
+shift trains with random shifts, and +sdpa, +triton and +flex set the attention backend. Baselines of --against are
detectron2's r50 and swin_t, or timm models. Ratios are relative to the first baseline, or else to the first model. With
several --size, the tool also fits how time and memory grow with the number of pixels. Config overrides apply to models,
not to baselines.

Example:
    python tools/benchmark.py --what backbone --models vil_tiny_rpb vil_small_rpb --against swin_t --size 800 1344
    python tools/benchmark.py --what backbone --backward --models vil_small_rpb vil_small_rpb+shift --against swin_t \\
        --size 512 672
    python tools/benchmark.py --what train-step --detector mask_rcnn --models vil_small_rpb --against r50 swin_t \\
        --size 512 672 --batch-size 2 --json step.json
    python tools/benchmark.py --what attention --models vil_small_rpb full_small --size 400 672 --size 800 1344 \\
        --plot growth.png
"""

from pathlib import Path

from vil.arguments import ConfigToolParser, config_of, output_file, positive, run_tool, write_json

BASE = Path(__file__).resolve().parents[1] / "configs/base"
MODELS = ("attention", "backbone", "detector", "train-step")
DTYPES = ("float32", "bfloat16", "float16")


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    parser.add_argument("--what", choices=MODELS, default="backbone", help="part to measure (default backbone)")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME", help="variants, timm:MODEL or configs")
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME", help="r50, swin_t, or timm models")
    detectors, detector_help = ("retinanet", "mask_rcnn"), "detector of the variants (default retinanet)"
    parser.add_argument("--detector", choices=detectors, default=detectors[0], help=detector_help)
    parser.add_argument("--backward", action="store_true", help="include the backward pass of attention and backbones")
    size = {"type": positive, "nargs": 2, "action": "append", "metavar": ("H", "W")}
    parser.add_argument("--size", **size, help="image size in pixels; may be repeated (default 800 1344)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images per batch (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="autocast data type (default float32)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="timed runs of each model (default 5)")
    parser.add_argument("--no-memory", action="store_true", help="measure only time, which is faster on a CPU")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="plot the results (.png or .svg)")
    args = parser.parse_args()
    if args.plot and Path(args.plot).suffix not in (".png", ".svg"):
        parser.error(f"argument --plot: {args.plot} does not end in .png or .svg")

    from projects_vil import analysis

    args.config_file = BASE / f"{args.detector}.yaml"
    options = {
        **{"part": args.what, "base": args.config_file, "batch_size": args.batch_size, "backward": args.backward},
        **{"device": config_of(args).MODEL.DEVICE, "dtype": args.dtype, "overrides": tuple(args.opts)},
    }
    names = [(name, False) for name in args.models] + [(name, True) for name in args.against]
    reference = len(args.models) if args.against else 0
    rows = []
    for size in args.size or [(800, 1344)]:
        cases = [analysis.BenchmarkCase(*name, size=tuple(size), **options) for name in names]
        rows += analysis.measure(cases, reference=reference, runs=args.runs, memory=not args.no_memory)
    print(analysis.format_measurements(rows, reference=names[reference][0]))
    write_json(args.json, {"measurements": rows, "growth": analysis.growth(rows)})
    if args.plot:
        analysis.plot_measurements(rows, args.plot)


if __name__ == "__main__":
    run_tool(main)
