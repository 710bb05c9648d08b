"""Run `vil train` with different options on a small dataset, and print one table.

It has a row for each set of options and seed: AP and AP50 on the validation images, images per iteration, CPU seconds
of the whole run (start, training and evaluations), training images per CPU second, and peak memory. The runs are in
DIR/ROW_SEED. Set OMP_NUM_THREADS=1 for figures of one core.

Example:
    python -m research.small_data photos --output output/small_data
    python -m research.small_data photos --output output/small_data --rows default no_ema --seeds 0 1 2 --epochs 4
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

from projects_vil import load_config

# Options of `vil train` by the name of the row.
ROWS = {
    "default": "",
    "128_pixels": "--image-size 128",
    "256_pixels": "--image-size 256",
    "lr_1e-3": "--lr 1e-3",
    "lr_2e-3": "--lr 2e-3",
    "batch_4": "--batch 4",
    "giou": "MODEL.RETINANET.BBOX_REG_LOSS_TYPE giou",
    "no_ema": "MODEL.EMA.ENABLED False",
    "no_distortion": "INPUT.PHOTOMETRIC_DISTORTION False",
    "trained_bn": "MODEL.TRANSFORMER.NORM BN",
    "random_weights": "--weights none",
    "paper": "--model vil_tiny --recipe paper",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="dataset in a format of vil train")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the runs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S", help="random seeds (default 0)")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of all rows (default: of each row)")
    args = parser.parse_args()
    length = ["--epochs", str(args.epochs)] if args.epochs else []
    table = []
    for row in args.rows:
        for seed in args.seeds:
            table.append(
                [row, seed, *measure(args.data, args.output / f"{row}_{seed}", row, [*length, "SEED", str(seed)])]
            )
            print(tabulate([table[-1]], tablefmt="plain", floatfmt=".1f"), file=sys.stderr)
    headers = ["row", "seed", "AP", "AP50", "batch", "CPU s", "images per CPU s", "peak GB"]
    print(tabulate(table, headers, tablefmt="github", floatfmt=".1f"))


def measure(data: str, folder: Path, row: str, options: list[str]) -> list[float]:
    """Train in a process of its own, and return the values of a row of the table."""
    command = [sys.executable, "-m", "vil.cli", "train", data, "--output", str(folder), *ROWS[row].split(), *options]
    process = subprocess.Popen([*command, "OVERWRITE_OUTPUT_DIR", "True"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: {' '.join(command)} failed. Its messages are above.")
    ((_, results),) = json.loads((folder / "evaluation.json").read_text()).items()
    solver, seconds = load_config(folder / "config.yaml").SOLVER, usage.ru_utime + usage.ru_stime
    images = solver.MAX_ITER * solver.IMS_PER_BATCH
    box = results["bbox"]
    # In kilobytes on Linux.
    return [box["AP"], box["AP50"], solver.IMS_PER_BATCH, seconds, images / seconds, usage.ru_maxrss / 1e6]


if __name__ == "__main__":
    main()
