"""Time and memory of models beside each other: by turns in one process, medians and quartiles.

Models are variants or config files. Behind a name, +checkpointing is activation checkpointing, +shift random-shift
training, and +sdpa and +triton are attention backends. --against names baselines: r50 and swin_t of detectron2, or
models of timm; ratios are to the first of them, or to the first model. Several --size are a sweep, with the exponents
of pixels that time and memory grow by. --limits says what holds a model up: arithmetic, memory, or the calls of its
operators. Overrides of config keys are for the models, not for the baselines.

Example:
    python tools/benchmark.py --what backbone --models vil_tiny_rpb vil_small_rpb --against swin_t --size 800 1344
    python tools/benchmark.py --what backbone --backward --models vil_small_rpb vil_small_rpb+shift --against swin_t \\
        --size 512 672
    python tools/benchmark.py --what train-step --detector mask_rcnn --models vil_small_rpb --against r50 swin_t \\
        --size 512 672 --batch-size 2 --json step.json
    python tools/benchmark.py --what attention --models vil_small_rpb full_small --size 400 672 --size 800 1344 \\
        --plot growth.png
    python tools/benchmark.py --models vil_small_rpb lit_s --against swin_t --size 512 672 --backward --limits
"""

import functools
from pathlib import Path

from backbones import InputError
from projects_vil.analysis import (
    DTYPES,
    WHATS,
    Case,
    as_json_of,
    draw_measurements,
    find_limits,
    format_limits,
    format_measurements,
    measure,
    measure_rates,
)
from projects_vil.config import ConfigToolParser, config_of
from projects_vil.utils import check_json_path, run_tool, write_json

BASE = Path(__file__).resolve().parents[1] / "configs/base"


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    parser.add_argument("--what", choices=WHATS, default="backbone", help="what is timed (default backbone)")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME", help="variants or config files")
    parser.add_argument("--against", nargs="+", default=[], metavar="NAME", help="r50, swin_t, or models of timm")
    parser.add_argument("--detector", choices=("retinanet", "mask_rcnn"), default="retinanet", help="of variants")
    parser.add_argument("--backward", action="store_true", help="gradients too, of attention and backbones")
    parser.add_argument("--size", type=int, nargs=2, action="append", metavar=("H", "W"), help="default 800 1344")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of autocast (default float32, without it)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="times each is timed (default 5)")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave memory out, which on a CPU takes a process each"
    )
    parser.add_argument(
        "--limits", action="store_true", help="what the operators of each take, beside what the device can do"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--plot", metavar="FILE", help="draw time and memory against pixels there, as .png or .svg")
    args = parser.parse_args()
    check_json_path(args.json)
    _check_plot_path(args.plot)
    sizes = [tuple(size) for size in args.size or [(800, 1344)]]
    if min(*(side for size in sizes for side in size), args.batch_size, args.runs) < 1:
        raise InputError("--size, --batch-size and --runs are 1 or more")
    names = [(name, False) for name in args.models] + [(name, True) for name in args.against]
    args.config_file = str(BASE / f"{args.detector}.yaml")
    make = functools.partial(
        Case,
        what=args.what,
        base=BASE,
        detector=args.detector,
        batch_size=args.batch_size,
        backward=args.backward,
        device=config_of(args).MODEL.DEVICE,
        dtype=args.dtype,
        overrides=tuple(args.opts),
    )
    reference = len(args.models) if args.against else 0
    found, limits, rates = [], [], None
    for size in sizes:
        cases = [make(name=name, is_baseline=is_baseline, size=size) for name, is_baseline in names]
        found += measure(cases, reference=reference, runs=args.runs, memory=not args.no_memory)
        if args.limits:
            rates = rates or measure_rates(cases[0].device, args.dtype)
            limits += [find_limits(case, rates) for case in cases]
    print(format_measurements(found, reference=names[reference][0]))
    if limits:
        print(f"\n{format_limits(limits, found, rates)}")
    write_json(args.json, as_json_of(found, limits, rates))
    if args.plot:
        draw_measurements(found, args.plot)


def _check_plot_path(path: str | None) -> None:
    if path and (Path(path).suffix not in (".png", ".svg") or not Path(path).absolute().parent.is_dir()):
        raise InputError(f"--plot {path}: it is a .png or .svg file in a folder that exists")


if __name__ == "__main__":
    run_tool(main)
