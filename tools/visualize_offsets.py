"""Draw where places of LIT's last stage sample an image through its deformable merging modules (LIT Figure 2).

Example:
    python tools/visualize_offsets.py --config-file output/lit_s/config.yaml --weights output/lit_s/model_final.pth \\
        --input photo.jpg --output drawings --points 8
"""

from pathlib import Path

from projects_vil.config import ConfigToolParser, config_of
from projects_vil.utils import run_tool
from projects_vil.visualization import draw_offsets


def main() -> None:
    parser = ConfigToolParser(__doc__, weights=True, devices=["cpu"])
    parser.add_argument("--input", required=True, nargs="+", metavar="IMAGE", help="image files; a PNG for each")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the PNGs")
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--points", type=int, default=8, metavar="N", help="places spread over the image (default 8)")
    places.add_argument("--point", type=int, nargs=2, metavar=("Y", "X"), help="the place at this pixel alone")
    args = parser.parse_args()
    cfg = config_of(args)
    paths = draw_offsets(
        cfg,
        cfg.MODEL.WEIGHTS,
        args.input,
        args.output,
        num_points=args.points,
        point=args.point and tuple(args.point),
    )
    print("\n".join(f"wrote {path}" for path in paths))


if __name__ == "__main__":
    run_tool(main)
