"""Write one HTML page about a run: curves, precision and recall, classes, confusions, images, configuration.

The page needs no network and no other file. What the folder lacks is left out, and named.

Example:
    python tools/report.py output/demo_retinanet
    python tools/report.py output/mine DATASETS.COCO "[['mine', 'mine.json', 'photos']]"
"""

from vil.arguments import ConfigToolParser, run_tool
from vil.commands import add_report_arguments, report


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=())
    add_report_arguments(parser)
    report(parser.parse_args())


if __name__ == "__main__":
    run_tool(main)
