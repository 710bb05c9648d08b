"""Check a dataset and its images for what would stop or harm training and evaluation.

DATA is a folder or file of COCO, YOLO, Pascal VOC, LabelMe or CVAT, which the tool finds out; IMAGES is given for a
COCO file whose images are elsewhere. Findings are listed by severity: errors, values that are not as COCO writes them
but clear, and harmless ones; with the first example of each, what training does with it, and what a cleaned copy has
instead. The exit status is 1 where there are errors, and 0 where there are none or --fix has written a copy without
them, in COCO format.

Example:
    python tools/check_dataset.py mine
    python tools/check_dataset.py mine/data.yaml --fix mine_coco
    python tools/check_dataset.py mine/train.json mine/images --deep --fix mine/train_clean.json
"""

from vil.arguments import ToolParser, run_tool
from vil.commands import add_check_arguments, check


def main() -> None:
    parser = ToolParser(__doc__)
    add_check_arguments(parser)
    check(parser.parse_args())


if __name__ == "__main__":
    run_tool(main)
