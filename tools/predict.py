"""Detect objects in an image, in all images of a folder and its subfolders, or in a video.

The output folder gets results.json (COCO's format, boxes and masks in pixels of the files), images.json (which image
has which id, the categories, and what was skipped) and drawings/. Exit status: 0; 1 or 2 for wrong arguments; 2 also
where files that cannot be read were skipped, and all others are done.

Example:
    python tools/predict.py --config-file output/vil_tiny/config.yaml --weights output/vil_tiny/model_final.pth \\
        --input photos --output predictions --batch-size 4
    python tools/predict.py --config-file output/vil_tiny/config.yaml --weights output/vil_tiny/model_final.pth \\
        --input clip.mp4 --output predictions --score-threshold 0.3 TEST.DETECTIONS_PER_IMAGE 300
    python tools/predict.py --weights output/vil_tiny/export/model.onnx --input photos --output predictions
"""

import sys

from vil.arguments import ConfigToolParser, existing_path, positive, run_tool


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, config_required=False)
    parser.add_argument("--input", required=True, type=existing_path, metavar="PATH", help="image, folder, or video")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--tta", action="store_true", help="test-time augmentation: several sizes and mirror images")
    annotations_help = "COCO file of the folder: only its images are read; results have its ids and categories"
    parser.add_argument("--annotations", type=existing_path, metavar="FILE", help=annotations_help)
    parser.add_argument("--no-drawings", action="store_true", help="write no drawings, only the results")
    threshold_help = "lowest score of detections in drawings (default 0.5)"
    parser.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help=threshold_help)
    args = parser.parse_args()

    source = args.config_file or args.weights
    if source is None:
        parser.error("--config-file or --weights is required")

    from projects_vil.inference import Detector, predict

    summary = predict(
        Detector.load(source, tta=args.tta, overrides=args.opts),
        args.input,
        args.output,
        batch_size=args.batch_size,
        annotations=args.annotations,
        drawings=not args.no_drawings,
        score_threshold=args.score_threshold,
    )
    print("\n".join(summary.lines()))
    if summary.skipped:
        sys.exit(2)


if __name__ == "__main__":
    run_tool(main)
