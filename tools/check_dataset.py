"""Check a COCO file and its images for what would spoil or stop training and evaluation.

What is found is listed by kind: errors, what is read as it can only be meant, and what does no harm; with the first
of each, what training does with it, and what a cleaned copy has instead. The exit status is 1 where there are errors,
and 0 where there are none or --fix has written a copy without them.

Example:
    python tools/check_dataset.py mine/train.json mine/images
    python tools/check_dataset.py mine/train.json mine/images --deep --fix mine/train_clean.json
"""

import sys

from projects_vil.data import check_coco, check_output, write_cleaned
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("annotations", metavar="ANNOTATIONS", help="COCO annotation file")
    parser.add_argument("images", metavar="IMAGES", help="the folder of its images")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON too")
    parser.add_argument("--fix", metavar="OUT", help="write a copy without what was found; OUT must not exist")
    parser.add_argument("--deep", action="store_true", help="read every pixel of every image, not only the headers")
    parser.add_argument("--boxes", action="store_true", help="for a detector without masks: leave those alone")
    args = parser.parse_args()
    check_json_path(args.json, not_one_of=[args.annotations, *([args.fix] if args.fix else [])])
    if args.fix:
        check_output(args.annotations, args.fix)
    checked = check_coco(
        args.annotations, args.images, masks=False if args.boxes else None, pixels=args.deep, progress=_progress
    )
    findings = checked.findings
    print("\n".join(findings.lines()))
    write_json(args.json, findings.to_json())
    if args.fix:
        print(f"wrote {args.fix}: {write_cleaned(checked, args.fix)}")
    elif findings.count("error"):
        raise findings.error()


def _progress(number: int) -> None:
    if not number % 10_000:
        print(f"{number:,} images looked at", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
