"""Convert a checkpoint of an official project into one that MODEL.WEIGHTS takes, or into a classifier's.

The formats of vision-longformer, VisionLongformerForObjectDetection, transformer-ls and LIT (classification, detection
and segmentation) are told apart by their names. docs/checkpoints.md says what becomes of each tensor.

Example:
    python tools/convert_checkpoint.py model_best.pth vil_tiny.safetensors --model vil_tiny_rpb
    python tools/convert_checkpoint.py model_final.pth vil_small_coco.pth --model vil_small_rpb --json report.json
    python tools/convert_checkpoint.py model_best.pth vil_tiny_224.pth --model vil_tiny --classifier
"""

from backbones import InputError
from projects_vil.checkpoint import convert_file
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", metavar="SOURCE", help="the official checkpoint")
    parser.add_argument("output", metavar="OUTPUT", help="what to write: a name that ends in .pth or .safetensors")
    parser.add_argument("--model", required=True, metavar="VARIANT", help="its name here, as vil_small_rpb")
    parser.add_argument(
        "--img-size",
        type=int,
        nargs=2,
        metavar=("H", "W"),
        help="largest image, in pixels, that tables of positions are resized to now: a detector's for its longer side "
        "both ways, since images lie and stand; by default ViL's absolute positions are made for 1333 x 1333, and "
        "other tables keep the size that models resize to each map from",
    )
    parser.add_argument("--classifier", action="store_true", help="for create_classifier; H W is the size of its input")
    parser.add_argument("--json", metavar="REPORT", help="write what became of every name there")
    args = parser.parse_args()
    check_json_path(args.json, not_one_of=(args.source, args.output))
    if args.img_size and min(args.img_size) < 1:
        raise InputError(f"--img-size {args.img_size[0]} {args.img_size[1]}: a height and a width in pixels")
    img_size = tuple(args.img_size) if args.img_size else None
    conversion = convert_file(args.source, args.output, args.model, img_size=img_size, classifier=args.classifier)
    print("\n".join([*conversion.lines(), f"wrote {args.output}"]))
    write_json(args.json, conversion.as_json())


if __name__ == "__main__":
    run_tool(main)
