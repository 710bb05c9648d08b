"""Write one HTML page about a run: curves, precision and recall, classes, confusions, drawings, configuration.

The page needs no network and no other file. What the folder lacks is left out, and named.

Example:
    python tools/report.py output/demo_retinanet
"""

from pathlib import Path

from projects_vil.report import write_report
from projects_vil.utils import ToolParser, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("run", type=Path, metavar="OUTPUT_DIR", help="the folder of a run of train_net.py")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: OUTPUT_DIR/report.html")
    parser.add_argument("--num-images", type=int, default=8, metavar="N", help="validation images drawn (default 8)")
    parser.add_argument(
        "--opts", nargs="+", default=[], metavar="KEY VALUE", help="overrides of the run's config: DATASETS.COCO, say"
    )
    args = parser.parse_args()
    path = write_report(args.run, args.output, num_images=args.num_images, overrides=args.opts)
    print(f"report written to {path} ({path.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    run_tool(main)
