"""Export a trained detector, load the file again in its own runtime, and check it against the detector.

Next to the model, model.ts, model.onnx, model.xml or model.pt2, are its metadata (what to feed it, what it returns,
class names) and the report of the check, both JSON. The exit status is 1 where a detection differs by more than the
tolerance.

Example:
    python tools/export_model.py --config-file output/demo_retinanet/config.yaml --weights \\
        output/demo_retinanet/model_final.pth --format onnx --output output/demo_retinanet/export
"""

from vil.arguments import ConfigToolParser, run_tool
from vil.commands import add_export_arguments, export


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, devices=("cpu",))
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the model, its metadata and report")
    add_export_arguments(parser)
    export(parser.parse_args())


if __name__ == "__main__":
    run_tool(main)
