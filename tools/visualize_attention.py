"""Draw where a token of an image looks, a heat map for each head of one attention, into a PNG.

Example:
    python tools/visualize_attention.py --config-file output/vil_tiny/config.yaml --weights \\
        output/vil_tiny/model_final.pth --input photo.jpg --output drawings --stage 3 --block 9 --point 120 200
"""

from pathlib import Path

from projects_vil.config import ConfigToolParser, config_of
from projects_vil.utils import run_tool
from projects_vil.visualization import draw_attention


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, devices=["cpu"])
    parser.add_argument("--input", required=True, metavar="IMAGE", help="image file")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the PNG")
    parser.add_argument("--stage", required=True, type=int, metavar="S", help="stage of the backbone, from 1")
    parser.add_argument("--block", required=True, type=int, metavar="B", help="block of the stage, from 1")
    parser.add_argument("--point", required=True, type=int, nargs=2, metavar=("Y", "X"), help="pixel of the image")
    args = parser.parse_args()
    cfg = config_of(args)
    path = draw_attention(
        cfg,
        cfg.MODEL.WEIGHTS,
        args.input,
        args.output,
        stage=args.stage,
        block=args.block,
        point=tuple(args.point),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    run_tool(main)
