"""Write one HTML page about a run: curves, precision and recall, classes, confusions, images, configuration.

The page needs no network and no other file. What the folder lacks is left out, and named.

Example:
    python tools/report.py output/demo_retinanet
    python tools/report.py output/mine DATASETS.COCO "[['mine', 'mine.json', 'photos']]"
"""

from vil.arguments import ConfigToolParser, existing_path, output_file, run_tool


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=())
    parser.add_argument("run", type=existing_path, metavar="OUTPUT_DIR", help="the folder of a run of train_net.py")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="page (default: OUTPUT_DIR/report.html)")
    parser.add_argument("--num-images", type=int, default=8, metavar="N", help="validation images (default 8)")
    args = parser.parse_args()

    from projects_vil.report import write_report

    path = write_report(args.run, args.output, num_images=args.num_images, overrides=args.opts)
    print(f"report written to {path} ({path.stat().st_size / 2**20:.1f} MB)")


if __name__ == "__main__":
    run_tool(main)
