"""Detect objects in an image, in all images of a folder and its subfolders, or in a video or stream.

The output folder gets results.json (COCO's format, boxes and masks in pixels of the files), images.json (which image
has which id, the categories, and what was skipped) and drawings/; with --format parquet part files, a row an image,
which a killed run goes on after (docs/scale.md). Exit status: 0; 1 or 2 for wrong arguments; 2 also where files that
cannot be read were skipped, and others are done.

Example:
    python tools/predict.py --config-file output/vil_tiny/config.yaml --weights output/vil_tiny/model_final.pth \\
        --input photos --output predictions --batch-size 4
    python tools/predict.py --config-file output/vil_tiny/config.yaml --weights output/vil_tiny/model_final.pth \\
        --input clip.mp4 --output predictions --score-threshold 0.5 TEST.DETECTIONS_PER_IMAGE 300
    python tools/predict.py --weights output/vil_tiny/export/model.onnx --input photos --output predictions
    python tools/predict.py --weights output/vil_tiny/export/model.onnx --input 0 --output webcam
    python tools/predict.py --weights lit_ti_retinanet_1x --input photos --output predictions
"""

from vil.arguments import ConfigToolParser, image_source, run_tool
from vil.commands import INPUT_HELP, add_predict_arguments, predict


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, config_required=False)
    parser.add_argument("--input", required=True, type=image_source, metavar="PATH", help=INPUT_HELP)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    add_predict_arguments(parser)
    args = parser.parse_args()
    if not (args.config_file or args.weights):
        parser.error("--config-file or --weights is required")
    predict(args.config_file or args.weights, args)


if __name__ == "__main__":
    run_tool(main)
