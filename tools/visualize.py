"""Render attention, training data, sampling offsets or results of a detector as PNG files.

Example:
    python tools/visualize.py attention --config-file output/vil_tiny/config.yaml --weights \\
        output/vil_tiny/model_final.pth --input photo.jpg --output drawings --stage 3 --block 9 --point 120 200
    python tools/visualize.py data --config-file configs/demo/mask_rcnn_vil_shapes.yaml --output drawings/strong \\
        INPUT.AUGMENTATION lsj_copy_paste INPUT.LSJ.SIZE 128
    python tools/visualize.py offsets --config-file output/lit_s/config.yaml --weights output/lit_s/model_final.pth \\
        --input photo.jpg --output drawings --points 8
    python tools/visualize.py results --run output/demo_retinanet --num-images 8
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vil.arguments import ConfigToolParser, ToolParser, config_of, existing_path, output_file, positive, run_tool, show


def main() -> None:
    parser = ToolParser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="WHAT", parser_class=ConfigToolParser)

    def add(render: Callable[[argparse.Namespace], list[str]], summary: str, **options: Any) -> ConfigToolParser:
        command = commands.add_parser(render.__name__, help=summary, description=render.__doc__, **options)
        command.set_defaults(render=render)
        return command

    add_image = partial(ConfigToolParser.add_argument, required=True, type=existing_path, metavar="IMAGE")
    add_folder = partial(ConfigToolParser.add_argument, required=True, type=Path, metavar="DIR")

    command = add(attention, "a heat map of one token's attention for each head", weights=True, devices=("cpu",))
    add_image(command, "--input", help="image file")
    add_folder(command, "--output", help="folder for the PNG")
    command.add_argument("--stage", required=True, type=int, metavar="S", help="stage of the backbone, from 1")
    command.add_argument("--block", required=True, type=int, metavar="B", help="block of the stage, from 1")
    command.add_argument("--point", required=True, type=int, nargs=2, metavar=("Y", "X"), help="pixel of the image")

    command = add(data, "training samples after augmentation", devices=())
    add_folder(command, "--output", help="folder for the PNGs, one per sample")
    command.add_argument("--number", type=positive, default=16, metavar="N", help="number of samples (default 16)")
    command.add_argument("--seed", type=int, metavar="S", help="seed of the run; default: SEED of the config, or 0")

    command = add(offsets, "sampling points of LIT's deformable token merging", weights=True, devices=("cpu",))
    add_image(command, "--input", nargs="+", help="image files; a PNG for each")
    add_folder(command, "--output", help="folder for the PNGs")
    points = command.add_mutually_exclusive_group()
    points.add_argument("--points", type=positive, default=8, metavar="N", help="positions spread evenly (default 8)")
    points.add_argument("--point", type=int, nargs=2, metavar=("Y", "X"), help="only the position at this pixel")

    command = add(results, "predictions of a run next to the ground truth", config_file=False, devices=())
    command.add_argument("--run", required=True, type=existing_path, metavar="DIR", help="OUTPUT_DIR of train_net.py")
    command.add_argument("--dataset", metavar="NAME", help="dataset (default: the first of DATASETS.TEST)")
    command.add_argument("--output", type=output_file, metavar="PNG", help="default: DIR/predictions.png")
    command.add_argument("--num-images", type=positive, default=8, metavar="N", help="images, one per row (default 8)")
    command.add_argument("--score-threshold", type=float, default=0.3, metavar="T", help="lowest score (default 0.3)")

    args = parser.parse_args()
    show(*args.render(args))


def attention(args: argparse.Namespace) -> list[str]:
    """Render which tokens one token of an image attends to, a heat map for each head of one block."""
    from projects_vil.visualization import draw_attention

    cfg = config_of(args)
    position = {"stage": args.stage, "block": args.block, "point": args.point}
    return [f"wrote {draw_attention(cfg, cfg.MODEL.WEIGHTS, args.input, args.output, **position)}"]


def data(args: argparse.Namespace) -> list[str]:
    """Render training samples as the model gets them, after all augmentation: the first ones of a run."""
    from projects_vil.config import check_override_effects, load_config
    from projects_vil.data import register_datasets
    from projects_vil.engine import check_values
    from projects_vil.visualization import draw_samples

    cfg = load_config(args.config_file, args.opts)
    check_values(cfg)
    check_override_effects(cfg, args.opts)
    register_datasets(cfg)
    return [f"wrote {path}" for path in draw_samples(cfg, args.output, number=args.number, seed=args.seed)]


def offsets(args: argparse.Namespace) -> list[str]:
    """Render where positions of LIT's last stage sample an image, through its token merging (LIT, figure 2)."""
    from projects_vil.visualization import draw_offsets

    cfg = config_of(args)
    tokens = {"num_points": args.points, "point": args.point}
    return [f"wrote {path}" for path in draw_offsets(cfg, cfg.MODEL.WEIGHTS, args.input, args.output, **tokens)]


def results(args: argparse.Namespace) -> list[str]:
    """Render a run's predictions next to the ground truth, then print its metrics and files."""
    from projects_vil.config import load_config
    from projects_vil.data import load_dataset, register_datasets
    from projects_vil.visualization import draw_results, predictions_file, summarize_run

    run = Path(args.run)
    cfg = load_config(run / "config.yaml", args.opts)
    register_datasets(cfg)
    dataset = args.dataset or next(iter(cfg.DATASETS.TEST), "")
    records = load_dataset(cfg, [dataset], train=False)
    drawing = Path(args.output) if args.output else run / "predictions.png"
    options = {"num_images": args.num_images, "score_threshold": args.score_threshold}
    draw_results(dataset, records, predictions_file(run, dataset), drawing, **options)
    return summarize_run(run, dataset, num_images=len(records), drawing=drawing)


if __name__ == "__main__":
    run_tool(main)
