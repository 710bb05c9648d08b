"""Convert a checkpoint of an official project into one for MODEL.WEIGHTS, or into a classifier.

The formats of vision-longformer, VisionLongformerForObjectDetection, transformer-ls and LIT (classification, detection
and segmentation) are recognised by the names of their tensors. docs/checkpoints.md lists what each tensor becomes.

Example:
    python tools/convert_checkpoint.py model_best.pth vil_tiny.safetensors --model vil_tiny_rpb
    python tools/convert_checkpoint.py model_final.pth vil_small_coco.pth --model vil_small_rpb --json report.json
    python tools/convert_checkpoint.py model_best.pth vil_tiny_224.pth --model vil_tiny --classifier
"""

from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="the official checkpoint")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    parser.add_argument("--model", required=True, metavar="VARIANT", help="variant, such as vil_small_rpb")
    size_help = (
        "largest image in pixels to which position tables are resized now: a detector's longer side in both "
        "directions, since images are landscape and portrait; by default ViL's absolute positions are made for "
        "1333 x 1333, and other tables keep the size from which models resize them to each feature map"
    )
    parser.add_argument("--img-size", type=positive, nargs=2, metavar=("H", "W"), help=size_help)
    classifier_help = "convert a whole classifier, for create_classifier; H W is its image size"
    parser.add_argument("--classifier", action="store_true", help=classifier_help)
    parser.add_argument("--json", type=output_file, metavar="REPORT", help="write the report on every name there")
    args = parser.parse_args()

    from projects_vil.checkpoint import convert_file

    img_size = tuple(args.img_size) if args.img_size else None
    conversion = convert_file(args.source, args.output, args.model, img_size=img_size, classifier=args.classifier)
    print("\n".join([*conversion.lines(), f"wrote {args.output}"]))
    write_json(args.json, conversion.as_json())


if __name__ == "__main__":
    run_tool(main)
