"""Count the parameters and FLOPs of detectors, or of every variant, beside the figures of the papers.

Example:
    python tools/analyze_model.py --config-file configs/retinanet/vil_tiny_1x.yaml
    python tools/analyze_model.py --no-flops --config-file configs/*/vil_*_1x.yaml --json counts.json
    python tools/analyze_model.py --variants
    python tools/analyze_model.py --variants vil_tiny lit --json variants.json
"""

from backbones import InputError
from projects_vil import load_config
from projects_vil.analysis import analyze, as_json, count_variants, format_analyses, format_counts
from projects_vil.config import ConfigToolParser
from projects_vil.utils import check_json_path, run_tool, write_json


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=[])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config-file", nargs="+", metavar="FILE", help="configs; several for a table")
    what.add_argument(
        "--variants", nargs="*", metavar="PREFIX", help="a table of the variants that start so, or of all of them"
    )
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="of the image; 800 1333 without it")
    parser.add_argument("--no-flops", action="store_true", help="count parameters only, in a second")
    parser.add_argument("--json", metavar="FILE", help="write the counts there too")
    args = parser.parse_args()
    check_json_path(args.json)
    if args.variants is not None:
        for option, given in (("--size", args.size), ("--no-flops", args.no_flops), ("an override", args.opts)):
            if given:
                raise InputError(f"{option} is for --config-file")
        counts = count_variants(args.variants)
        print(format_counts(counts))
        write_json(args.json, as_json(counts))
        return
    size = tuple(args.size or (800, 1333))
    if min(size) < 1:
        raise InputError(f"--size {size[0]} {size[1]}: a height and a width in pixels")
    analyses = [
        analyze(load_config(path, args.opts), path, size=size, with_flops=not args.no_flops)
        for path in args.config_file
    ]
    print(format_analyses(analyses))
    write_json(args.json, as_json(analyses))


if __name__ == "__main__":
    run_tool(main)
