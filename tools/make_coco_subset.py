"""Cut a few images out of a COCO annotation file, to see whether a detector can learn them by heart.

Example:
    python tools/make_coco_subset.py datasets/coco/annotations/instances_train2017.json eight.json --num-images 8
"""

from projects_vil.data import write_subset
from projects_vil.utils import ToolParser, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", metavar="SOURCE", help="COCO annotation file")
    parser.add_argument("output", metavar="OUTPUT", help="annotation file to write; the photos stay where they are")
    parser.add_argument("--num-images", type=int, default=8, metavar="N", help="how many (default 8)")
    args = parser.parse_args()
    count = write_subset(args.source, args.output, num_images=args.num_images)
    print(f"wrote {args.output}: {count} images")


if __name__ == "__main__":
    run_tool(main)
