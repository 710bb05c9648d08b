"""Remove the optimizer and trainer state from a checkpoint. The new file has about a third of the size.

The metadata is kept (variant, classes, input format). The file works as MODEL.WEIGHTS, but not for --resume.

Example:
    python tools/slim_checkpoint.py output/vil_tiny/model_final.pth vil_tiny_coco.safetensors
"""

from vil.arguments import ToolParser, existing_path, output_file, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="checkpoint of a training run")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    args = parser.parse_args()

    from projects_vil.checkpoint import slim_checkpoint

    print("\n".join([*slim_checkpoint(args.source, args.output), f"wrote {args.output}"]))


if __name__ == "__main__":
    run_tool(main)
