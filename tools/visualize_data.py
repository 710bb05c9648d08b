"""Draw training samples as the model gets them, after all augmentation: the first ones of a run with that seed.

Example:
    python tools/visualize_data.py --config-file configs/demo/mask_rcnn_vil_shapes.yaml --output drawings/strong \\
        INPUT.AUGMENTATION strong INPUT.LSJ.SIZE 128
"""

from pathlib import Path

from projects_vil.config import ConfigToolParser, check_typed_keys, load_config
from projects_vil.data import register_datasets
from projects_vil.engine import check_values
from projects_vil.utils import run_tool
from projects_vil.visualization import draw_samples


def main() -> None:
    parser = ConfigToolParser(__doc__, devices=[])
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the PNGs, one a sample")
    parser.add_argument("--number", type=int, default=16, metavar="N", help="samples to draw (default 16)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the run; default: SEED of the config, or 0")
    args = parser.parse_args()
    cfg = load_config(args.config_file, args.opts)
    check_values(cfg)
    check_typed_keys(cfg, args.opts)
    register_datasets(cfg)
    paths = draw_samples(cfg, args.output, number=args.number, seed=args.seed)
    print("\n".join(f"wrote {path}" for path in paths))


if __name__ == "__main__":
    run_tool(main)
