"""Export a trained detector and check the file against the detector it came from.

Example:
    python tools/export_model.py --config-file output/demo_retinanet/config.yaml --weights \\
        output/demo_retinanet/model_final.pth --format torchscript --output output/demo_retinanet/export
"""

import argparse
import sys

from projects_vil import load_config
from projects_vil.cli import run_tool
from projects_vil.export import FORMATS, describe, export_detector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="config of the detector")
    parser.add_argument("--weights", metavar="FILE", help="checkpoint (default: MODEL.WEIGHTS of the config)")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="what to write (default torchscript)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the model and report.json")
    parser.add_argument("--images", nargs="+", default=[], metavar="FILE", help="images to compare on")
    parser.add_argument("--opts", default=[], nargs="+", metavar="KEY VALUE", help="overrides of config keys")
    args = parser.parse_args()
    cfg = load_config(args.config_file, args.opts)
    path, rows = export_detector(
        cfg, args.weights or cfg.MODEL.WEIGHTS, args.output, file_format=args.format, images=args.images
    )
    text, proven = describe(rows)
    print(f"{text}\nwrote {path}")
    if not proven:
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
