"""Write a trained checkpoint without its optimizer and trainer: a third of the size, for evaluation and export.

It keeps what the file says of itself (variant, classes, input format). Training cannot be resumed from it, but can
start from it.

Example:
    python tools/slim_checkpoint.py output/vil_tiny/model_final.pth vil_tiny_coco.safetensors
"""

import argparse

from projects_vil.checkpoint import slim_checkpoint
from projects_vil.utils import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint of tools/train_net.py")
    parser.add_argument("output", metavar="OUTPUT", help="what to write: a name that ends in .pth or .safetensors")
    args = parser.parse_args()
    print("\n".join([*slim_checkpoint(args.source, args.output).lines(), f"wrote {args.output}"]))


if __name__ == "__main__":
    run_tool(main)
