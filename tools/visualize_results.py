"""Draw a run's predictions beside ground truth into a PNG, then say what the run reached and where it lies.

Example:
    python tools/visualize_results.py --run output/demo_retinanet --num-images 8
"""

from pathlib import Path

from projects_vil.config import ConfigToolParser, load_config
from projects_vil.data import register_datasets
from projects_vil.utils import run_tool
from projects_vil.visualization import draw_results, predictions_file, summarize_run


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=[])
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="OUTPUT_DIR of train_net.py")
    parser.add_argument("--dataset", metavar="NAME", help="default: the run's first DATASETS.TEST")
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: DIR/predictions.png")
    parser.add_argument("--num-images", type=int, default=8, metavar="N", help="rows to draw (default 8)")
    parser.add_argument("--score-threshold", type=float, default=0.5, metavar="T", help="default 0.5")
    args = parser.parse_args()
    cfg = load_config(args.run / "config.yaml", args.opts)
    register_datasets(cfg)
    dataset_name = args.dataset or next(iter(cfg.DATASETS.TEST), "")
    drawing = args.output or args.run / "predictions.png"
    num_images = draw_results(
        dataset_name,
        predictions_file(args.run, dataset_name),
        drawing,
        num_images=args.num_images,
        score_threshold=args.score_threshold,
    )
    print("\n".join(summarize_run(args.run, dataset_name, num_images=num_images, drawing=drawing)))


if __name__ == "__main__":
    run_tool(main)
