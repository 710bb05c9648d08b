"""Check a COCO file and its images for what would stop or harm training and evaluation.

Findings are listed by severity: errors, values that are not as COCO writes them but clear, and harmless ones; with the
first example of each, what training does with it, and what a cleaned copy has instead. The exit status is 1 where
there are errors, and 0 where there are none or --fix has written a copy without them.

Example:
    python tools/check_dataset.py mine/train.json mine/images
    python tools/check_dataset.py mine/train.json mine/images --deep --fix mine/train_clean.json
"""

import os
import sys

from vil.arguments import ToolParser, existing_path, output_file, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("annotations", type=existing_path, metavar="ANNOTATIONS", help="COCO annotation file")
    parser.add_argument("images", type=existing_path, metavar="IMAGES", help="the folder of its images")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the findings as JSON too")
    parser.add_argument("--fix", type=output_file, metavar="OUT", help="write a cleaned copy; OUT must not exist")
    parser.add_argument("--deep", action="store_true", help="read every pixel of every image, not only the headers")
    parser.add_argument("--boxes", action="store_true", help="ignore masks, for a detector without them")
    args = parser.parse_args()

    if args.fix and os.path.lexists(args.fix):
        parser.error(f"--fix: {args.fix} exists: name a new file")

    from backbones import ConfigError
    from projects_vil.data import CocoFile, write_cleaned

    masks = False if args.boxes else None
    checked = CocoFile(args.annotations, args.images, masks=masks, pixels=args.deep, progress=_progress)
    print("\n".join(checked.lines()))
    write_json(args.json, checked.to_json())
    if args.fix:
        print(f"wrote {args.fix}: {write_cleaned(checked, args.fix)}")
    elif checked.unfixable():
        raise checked.error()
    elif errors := checked.findings("error"):
        number = f"{len(errors)} type{'s' * (len(errors) > 1)} of errors"
        raise ConfigError(f"{args.annotations} has {number}; --fix OUT writes a copy without them")


def _progress(number: int) -> None:
    if not number % 10_000:
        print(f"{number:,} images checked", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
