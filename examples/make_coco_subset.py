"""Write a COCO annotation file with a few images of another file, for example to test whether a detector overfits.

Example:
    python examples/make_coco_subset.py datasets/coco/annotations/instances_train2017.json eight.json --num-images 8
"""

from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="COCO annotation file")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="annotation file to write; must not exist")
    parser.add_argument("--num-images", type=positive, default=8, metavar="N", help="number of images (default 8)")
    args = parser.parse_args()

    from projects_vil.data import write_subset

    count = write_subset(args.source, args.output, num_images=args.num_images)
    fewer = f" (--num-images is {args.num_images}, but no other images have annotations)"
    print(f"wrote {args.output}: {count} images{fewer * (count < args.num_images)}")


if __name__ == "__main__":
    run_tool(main)
