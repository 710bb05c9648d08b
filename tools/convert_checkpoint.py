"""Convert a checkpoint of an official project into one for MODEL.WEIGHTS, or into a classifier.

The formats of vision-longformer, VisionLongformerForObjectDetection, transformer-ls and LIT (classification, detection
and segmentation) are recognised by the names of their tensors. docs/checkpoints.md lists what each tensor becomes.

Example:
    python tools/convert_checkpoint.py model_best.pth vil_tiny.safetensors --model vil_tiny_rpb
    python tools/convert_checkpoint.py model_final.pth vil_small_coco.pth --model vil_small_rpb --json report.json
    python tools/convert_checkpoint.py model_best.pth vil_tiny_224.pth --model vil_tiny --classifier
    python tools/convert_checkpoint.py lit_ti_retinanet_1x lit_ti_coco.safetensors
"""

from vil.arguments import ToolParser, run_tool
from vil.commands import add_convert_arguments, convert


def main() -> None:
    parser = ToolParser(__doc__)
    add_convert_arguments(parser)
    convert(parser.parse_args())


if __name__ == "__main__":
    run_tool(main)
