"""Export a trained detector, load the file again in its own runtime, and check it against the detector.

Beside the model, model.ts, model.onnx, model.xml or model.pt2, stand its metadata (what to feed it, what it gives,
class names) and the report of the check, both JSON. The exit status is 1 where an answer differs by more than the
tolerance.

Example:
    python tools/export_model.py --config-file output/demo_retinanet/config.yaml --weights \\
        output/demo_retinanet/model_final.pth --format onnx --output output/demo_retinanet/export
"""

import sys

from projects_vil.config import ConfigToolParser, config_of
from projects_vil.export import ALL_PRECISIONS, FORMATS, INPUT_DTYPES, describe_report, export_detector
from projects_vil.utils import run_tool


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, devices=["cpu"])
    parser.add_argument("--format", choices=FORMATS, default="torchscript", help="what to write (default torchscript)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the model and what is said of it")
    parser.add_argument("--precision", choices=ALL_PRECISIONS, default="fp32", help="of the network (default fp32)")
    parser.add_argument(
        "--input-dtype", choices=INPUT_DTYPES, default="uint8", help="that the model takes (default uint8)"
    )
    parser.add_argument("--batched", action="store_true", help="let the model take (B, 3, H, W)")
    parser.add_argument(
        "--fixed-detections",
        action="store_true",
        help="let it give TEST.DETECTIONS_PER_IMAGE rows, filled up with zeros, and their count",
    )
    parser.add_argument(
        "--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="the one size of its images (default any)"
    )
    parser.add_argument("--images", nargs="+", default=[], metavar="FILE", help="images to compare on")
    parser.add_argument("--evaluate", action="store_true", help="compare average precision on DATASETS.TEST too")
    parser.add_argument(
        "--calibration-images",
        type=int,
        metavar="N",
        help="of DATASETS.TRAIN, for --precision int8 (default 100, or all there are)",
    )
    parser.add_argument("--accept-drop", action="store_true", help="let int8 lose more than 1 AP on DATASETS.TEST")
    args = parser.parse_args()
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
