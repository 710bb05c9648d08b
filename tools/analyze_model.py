"""Count the parameters and FLOPs of detectors, or of variants, next to the figures of the papers.

Example:
    python tools/analyze_model.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml
    python tools/analyze_model.py --no-flops --config-file configs/*/vil_*_1x.yaml --json counts.json
    python tools/analyze_model.py --variants
    python tools/analyze_model.py --variants vil_tiny lit --json variants.json
"""

from vil.arguments import ConfigToolParser, existing_path, output_file, positive, run_tool, write_json


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=())
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config-file", nargs="+", type=existing_path, metavar="FILE", help="one or more configs")
    what.add_argument("--variants", nargs="*", metavar="PREFIX", help="all variants, or those with these prefixes")
    parser.add_argument("--size", type=positive, nargs=2, metavar=("H", "W"), help="image size (default 800 1333)")
    parser.add_argument("--no-flops", action="store_true", help="count only parameters, which is fast")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the counts to this file")
    args = parser.parse_args()
    if args.variants is not None and (args.size or args.no_flops or args.opts):
        parser.error("--size, --no-flops and overrides need --config-file")

    from projects_vil import load_config
    from projects_vil.analysis import count_detector, count_variants, format_detectors, format_variants

    if args.variants is not None:
        counts = count_variants(args.variants)
        print(format_variants(counts))
    else:
        size = tuple(args.size or (800, 1333))
        counts = [
            count_detector(load_config(path, args.opts), path, size=size, with_flops=not args.no_flops)
            for path in args.config_file
        ]
        print(format_detectors(counts))
    write_json(args.json, counts)


if __name__ == "__main__":
    run_tool(main)
