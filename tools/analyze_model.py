"""Count the parameters and FLOPs of detectors, beside the figures of the papers.

Example:
    python tools/analyze_model.py --config-file configs/retinanet/vil_tiny_1x.yaml
    python tools/analyze_model.py --no-flops --config-file configs/*/vil_*_1x.yaml --json counts.json
"""

import argparse

from backbones import InputError
from projects_vil import load_config
from projects_vil.analysis import analyze, as_json, format_analyses
from projects_vil.cli import check_json_path, run_tool, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, nargs="+", metavar="FILE", help="configs; several for a table")
    parser.add_argument("--size", type=int, nargs=2, default=(800, 1333), metavar=("H", "W"), help="of the image")
    parser.add_argument("--no-flops", action="store_true", help="count parameters only, in a second")
    parser.add_argument("--json", metavar="FILE", help="write the counts there too")
    parser.add_argument("--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of config keys")
    args = parser.parse_args()
    check_json_path(args.json)
    if min(args.size) < 1:
        raise InputError(f"--size {args.size[0]} {args.size[1]}: a height and a width in pixels")
    analyses = [
        analyze(load_config(path, args.opts), path, size=tuple(args.size), with_flops=not args.no_flops)
        for path in args.config_file
    ]
    print(format_analyses(analyses))
    write_json(args.json, as_json(analyses))


if __name__ == "__main__":
    run_tool(main)
