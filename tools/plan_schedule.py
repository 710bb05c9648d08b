"""Print the schedule that SOLVER.EPOCHS makes of a dataset's size, without training.

Example:
    python tools/plan_schedule.py --images 50 --epochs 20,40,80 --batch 8
    python tools/plan_schedule.py --config-file configs/retinanet/vil_tiny_1x.yaml --epochs 12 \\
        DATASETS.TRAIN "('mine',)"
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from backbones import InputError
from projects_vil import load_config, register_datasets
from projects_vil.solver import count_training_images, schedule_by_epochs
from projects_vil.utils import run_tool

CONFIG = Path(__file__).resolve().parents[1] / "configs/retinanet/vil_tiny_1x.yaml"
COLUMNS = ("epochs", "iterations", "steps", "warm-up", "evaluated every", "saved every")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config-file", default=str(CONFIG), metavar="FILE", help="whose schedule to keep the shape of (default: 1x)"
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help="of an epoch (default: those of DATASETS.TRAIN that are trained on)"
    )
    parser.add_argument("--epochs", required=True, metavar="E[,E...]", help="how many; a line of the table for each")
    parser.add_argument("--batch", type=int, metavar="B", help="images an iteration (default: SOLVER.IMS_PER_BATCH)")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="overrides, in pairs")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", args.epochs):
        raise InputError(f"--epochs {args.epochs}: it is a number of 1 or more, or several with commas between them")
    numbers = [int(number) for number in args.epochs.split(",")]
    batch = [] if args.batch is None else ["SOLVER.IMS_PER_BATCH", str(args.batch)]
    cfg = load_config(args.config_file, [*args.opts, *batch])
    register_datasets(cfg)
    num_images = count_training_images(cfg) if args.images is None else args.images
    rows, plans = [COLUMNS], []
    for epochs in numbers:
        typed = [*args.opts, *batch, "SOLVER.EPOCHS", str(epochs)]
        plan, lines = schedule_by_epochs(load_config(args.config_file, typed), num_images, typed)
        solver = plan.SOLVER
        steps = solver.STEPS if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR" else ()
        lengths = (solver.MAX_ITER, ", ".join(map(str, steps)) or "-", solver.WARMUP_ITERS)
        rows.append(tuple(map(str, (epochs, *lengths, plan.TEST.EVAL_PERIOD, solver.CHECKPOINT_PERIOD))))
        plans.append(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"{num_images} training images, {cfg.SOLVER.IMS_PER_BATCH} an iteration; all but epochs is in iterations")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\nto train so, add one of these to tools/train_net.py:")
    for epochs in numbers:
        print(" ".join([*batch, "SOLVER.EPOCHS", str(epochs)]))
    print("which is the same, for these images, as:")
    for lines in plans:
        print(lines[-1].partition(" is ")[2])


if __name__ == "__main__":
    run_tool(main)
