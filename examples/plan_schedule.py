"""Print the training schedule for SOLVER.EPOCHS and the size of a dataset. Nothing is trained.

Example:
    python examples/plan_schedule.py --images 50 --epochs 20,40,80 --batch 8
    python examples/plan_schedule.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml --epochs 12 \\
        DATASETS.TRAIN "('mine',)"
"""

import re
from pathlib import Path

from vil.arguments import ConfigToolParser, existing_path, positive, run_tool

CONFIG = Path(__file__).resolve().parents[1] / "configs/retinanet/vil_tiny_rpb_1x.yaml"
COLUMNS = ("epochs", "iterations", "steps", "warm-up", "evaluated every", "saved every")


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False, devices=())
    config_help = "config with the schedule to scale (default: 1x)"
    parser.add_argument("--config-file", default=CONFIG, type=existing_path, metavar="FILE", help=config_help)
    parser.add_argument("--images", type=positive, metavar="N", help="training images (default: DATASETS.TRAIN)")
    parser.add_argument("--epochs", required=True, metavar="E[,E...]", help="numbers of epochs, such as 12,24,48")
    parser.add_argument("--batch", type=positive, metavar="B", help="images per iteration (SOLVER.IMS_PER_BATCH)")
    args = parser.parse_args()
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", args.epochs):
        parser.error(f"argument --epochs: '{args.epochs}' is not a list of whole numbers of at least 1, such as 12,24")

    from tabulate import tabulate

    from backbones import ConfigError
    from projects_vil import load_config, register_datasets
    from projects_vil.data import load_dataset
    from projects_vil.solver import resolve_schedule

    batch = {} if args.batch is None else {"SOLVER.IMS_PER_BATCH": str(args.batch)}
    cfg = load_config(args.config_file, args.overrides | batch)
    register_datasets(cfg)
    try:
        num_images = args.images or len(load_dataset(cfg, cfg.DATASETS.TRAIN, train=True))
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}. If you do not have the dataset, give the number of images: --images N."
        ) from error
    rows, plans = [], []
    for epochs in map(int, args.epochs.split(",")):
        chosen = batch | {"SOLVER.EPOCHS": str(epochs)}
        overrides = args.overrides | chosen
        plan, lines = resolve_schedule(load_config(args.config_file, overrides), num_images, overrides)
        solver = plan.SOLVER
        steps = solver.STEPS if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR" else ()
        lengths = (solver.MAX_ITER, ", ".join(map(str, steps)) or "-", solver.WARMUP_ITERS)
        rows.append((epochs, *lengths, plan.TEST.EVAL_PERIOD, solver.CHECKPOINT_PERIOD))
        plans.append((" ".join(word for pair in chosen.items() for word in pair), lines[-1].partition(" sets ")[2]))
    print(f"{num_images} training images, {cfg.SOLVER.IMS_PER_BATCH} per iteration. Columns after epochs: iterations.")
    print(tabulate(rows, COLUMNS, tablefmt="plain", disable_numparse=True, stralign="right"))
    print("\nTo train with one of these schedules, add its line to the command of tools/train_net.py:")
    print("\n".join(short for short, _ in plans))
    print("For this number of images, these lines have the same effect:")
    print("\n".join(overrides for _, overrides in plans))


if __name__ == "__main__":
    run_tool(main)
