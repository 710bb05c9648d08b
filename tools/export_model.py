"""Export a trained detector, load the file again in its own runtime, and check it against the detector.

Next to the model, model.ts, model.onnx, model.xml or model.pt2, are its metadata (what to feed it, what it returns,
class names) and the report of the check, both JSON. The exit status is 1 where a detection differs by more than the
tolerance.

Example:
    python tools/export_model.py --config-file output/demo_retinanet/config.yaml --weights \\
        output/demo_retinanet/model_final.pth --format onnx --output output/demo_retinanet/export
"""

import sys

from vil.arguments import ConfigToolParser, config_of, existing_path, positive, run_tool

FORMATS = ("torchscript", "onnx", "aot_inductor", "torch_export", "openvino")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
DTYPES = ("uint8", "float32")


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, devices=("cpu",))
    parser.add_argument("--format", choices=FORMATS, default="torchscript", help="file format (default torchscript)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the model, its metadata and report")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the network (default fp32)")
    parser.add_argument("--input-dtype", choices=DTYPES, default="uint8", help="type of the images (default uint8)")
    parser.add_argument("--batched", action="store_true", help="export a model that takes batches (B, 3, H, W)")
    fixed_help = "return TEST.DETECTIONS_PER_IMAGE rows, padded with zeros, and the number of detections"
    parser.add_argument("--fixed-detections", action="store_true", help=fixed_help)
    parser.add_argument("--size", nargs=2, type=positive, metavar=("H", "W"), help="the only image size (default: any)")
    images_help = "images on which file and detector are compared"
    parser.add_argument("--images", nargs="+", type=existing_path, default=[], metavar="FILE", help=images_help)
    parser.add_argument("--evaluate", action="store_true", help="compare average precision on DATASETS.TEST too")
    calibration_help = "images of DATASETS.TRAIN on which int8 is calibrated (default 100, or all)"
    parser.add_argument("--calibration-images", type=positive, default=100, metavar="N", help=calibration_help)
    parser.add_argument("--accept-drop", action="store_true", help="accept an int8 model that loses more than 1 AP")
    args = parser.parse_args()

    from projects_vil.export import describe_report, export_detector

    cfg = config_of(args)
    path, report = export_detector(
        cfg,
        cfg.MODEL.WEIGHTS,
        args.output,
        file_format=args.format,
        precision=args.precision,
        input_dtype=args.input_dtype,
        batched=args.batched,
        fixed_detections=args.fixed_detections,
        size=args.size and tuple(args.size),
        images=args.images,
        evaluate=args.evaluate,
        calibration_images=args.calibration_images,
        accept_drop=args.accept_drop,
    )
    print(f"{describe_report(report)}\nwrote {path}")
    if not report["ok"]:
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
