"""Write a trained checkpoint without its optimizer and trainer: a third of the size, for evaluation and export.

It keeps the metadata (variant, classes, input format). Training cannot be resumed from it, but can start from it.

Example:
    python tools/slim_checkpoint.py output/vil_tiny/model_final.pth vil_tiny_coco.safetensors
"""

from vil.arguments import ToolParser, existing_path, output_file, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="a checkpoint of tools/train_net.py")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    args = parser.parse_args()

    from projects_vil.checkpoint import slim_checkpoint

    print("\n".join([*slim_checkpoint(args.source, args.output), f"wrote {args.output}"]))


if __name__ == "__main__":
    run_tool(main)
