"""Export the demos' detectors with every backbone family in every format, and print one table.

It has a row for each detector, runtime and precision: average precision, latency, size and peak memory, all of one
file, beside eager's, and how far its answers are from eager's.

Files and reports are in DIR/DETECTOR_FAMILY. The exit status is 1 where a cell failed or is not equal to eager. Weights
are random where there is no trained run: make one with tools/train_net.py and OUTPUT_DIR DIR/DETECTOR_FAMILY.
AOTInductor compiles for minutes for each detector.

Example:
    python tools/export_table.py --output output/table --runs output/runs --json output/table.json
    python tools/export_table.py --output output/table --formats torchscript onnx --families lit --large
    python tools/export_table.py --output output/table --runs output/runs --evaluate --image-size 800 640
"""

import sys

from projects_vil.config import ConfigToolParser
from projects_vil.export import (
    ALL_PRECISIONS,
    FORMATS,
    TABLE_DETECTORS,
    TABLE_FAMILIES,
    available_formats,
    describe_table,
    export_table,
)
from projects_vil.utils import check_json_path, run_tool, write_json


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=["cpu"])
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for what is exported")
    parser.add_argument("--runs", metavar="DIR", help="folder with trained runs, DETECTOR_FAMILY/model_final.pth")
    parser.add_argument(
        "--detectors", nargs="+", choices=TABLE_DETECTORS, default=tuple(TABLE_DETECTORS), help="default: all"
    )
    parser.add_argument("--families", nargs="+", choices=TABLE_FAMILIES, default=TABLE_FAMILIES, help="default: all")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--formats", nargs="+", choices=FORMATS, help="default: all that can be had here")
    formats.add_argument("--no-aot-inductor", action="store_true", help="leave out what takes minutes to compile")
    parser.add_argument(
        "--precisions", nargs="+", choices=ALL_PRECISIONS, default=["fp32"], help="of the networks (default fp32)"
    )
    parser.add_argument(
        "--image-size", nargs=2, type=int, metavar=("H", "W"), help="that is timed (default: that of testing)"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="average precision of trained runs on DATASETS.TEST too"
    )
    parser.add_argument("--large", action="store_true", help="compare on 800 x 1333 too, slow on a CPU")
    parser.add_argument("--json", metavar="FILE", help="write the cells there too")
    args = parser.parse_args()
    check_json_path(args.json)
    without = {"aot_inductor"} if args.no_aot_inductor else set()
    cells = export_table(
        args.output,
        runs=args.runs,
        detectors=args.detectors,
        families=args.families,
        formats=args.formats or [name for name in available_formats() if name not in without],
        precisions=args.precisions,
        image_size=None if args.image_size is None else tuple(args.image_size),
        large=args.large,
        evaluate=args.evaluate,
        overrides=args.opts,
    )
    print(describe_table(cells))
    write_json(args.json, cells)
    if not all(cell.get("ok", True) for cell in cells):
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
