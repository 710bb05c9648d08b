"""Compare `vil train` with yolov8n from random weights, and with its own options, on small datasets.

All rows have the same images, validation split, metric (COCO AP) and one CPU thread. CPU time is user and system time
with all child processes. A finished run is in DIR/DATASET/ROW_SEED/result.json, and is not repeated. The tables are
DIR/table.md and DIR/table.json.

Example:
    python -m research.small_data photos --output output/small_data --ultralytics-python ultralytics/bin/python
    python -m research.small_data photos more --output output/small_data --rows ablations --epochs 2 --seeds 0 1 2
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from research.small_data.datasets import prepare_dataset
from research.small_data.programs import Ultralytics, Vil, inference_ms

DEFAULT = "default"
# Options of `vil train` by the name of the row. {size} is the image size of the row "default".
COMPARED = {DEFAULT: "", "random_weights": "--weights none"}
# The epochs of these rows are chosen so that they take as much CPU time as the row "default".
MATCHED = {"paper_recipe": "--model vil_tiny --recipe paper --batch 4 --image-size 192"}
ULTRALYTICS = {"yolov8n_256": "imgsz=256", "yolov8n_320": "imgsz=320", "yolov8n_640": "imgsz=640"}
ABLATIONS = {
    "no_ema": "MODEL.EMA.ENABLED False",
    "one_size": "INPUT.MIN_SIZE_TRAIN ({size},) INPUT.MIN_SIZE_TEST {size} INPUT.MAX_SIZE_TEST {longest}",
    "config_anchors": "--image-size {size} MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS [[0.5,1.0,2.0]]",
    "trained_bn": "MODEL.TRANSFORMER.NORM BN",
    "no_distortion": "INPUT.PHOTOMETRIC_DISTORTION False",
    "lr_2.5e-4": "--lr 2.5e-4",
    "lr_1e-3": "--lr 1e-3",
    "batch_4": "--batch 4",
    "larger_images": "--image-size {larger}",
    "no_frozen_stages": "MODEL.BACKBONE.FREEZE_AT 0",
    "giou": "MODEL.RETINANET.BBOX_REG_LOSS_TYPE giou",
    "last_lr_0": "SOLVER.BASE_LR_END 0",
    "random_lr_5e-4": "--weights none --lr 5e-4",
    "random_lr_2e-3": "--weights none --lr 2e-3",
    "random_batch_4": "--weights none --batch 4",
    "random_no_ema": "--weights none MODEL.EMA.ENABLED False",
    "random_efficientnet": "--weights none --model timm:tf_efficientnet_lite0",
}
ROWS = COMPARED | MATCHED | ULTRALYTICS | ABLATIONS
GROUPS = {"comparison": [*COMPARED, *MATCHED, *ULTRALYTICS], "ablations": [DEFAULT, "random_weights", *ABLATIONS]}
COLUMNS = {
    "AP": "AP",
    "AP50": "AP50",
    "epochs": "epochs",
    "images_per_cpu_second": "images per CPU-s",
    "start_cpu_seconds": "CPU-s to start",
    "cpu_seconds": "CPU-s",
    "peak_gb": "peak GB",
    "inference_cpu_ms": "inference, CPU-ms",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", nargs="+", type=Path, metavar="DATA", help="datasets in a format of vil train")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for runs and tables")
    rows_help = f"comparison (default), ablations, or names of rows: {', '.join(ROWS)}"
    add("--rows", nargs="+", choices=[*GROUPS, *ROWS], default=["comparison"], metavar="ROW", help=rows_help)
    add("--seeds", nargs="+", type=int, default=[0], metavar="S", help="random seeds (default 0)")
    add("--epochs", type=int, metavar="N", help="epochs of the rows without a CPU time to match (default: by recipe)")
    add("--classes", type=int, metavar="N", help="keep the N most frequent classes and their images (default: all)")
    python_help = "Python interpreter of an environment with ultralytics (default: no rows of ultralytics)"
    add("--ultralytics-python", type=Path, metavar="FILE", help=python_help)
    args = parser.parse_args()
    rows = [*dict.fromkeys(row for name in args.rows for row in GROUPS.get(name, [name]))]
    args.output = args.output.absolute()
    for source in args.data:
        folder = args.output / (source.stem + (f"_{args.classes}_classes" if args.classes else ""))
        prepare_dataset(source, folder / "data", args.classes)
        for seed in args.seeds:
            for row in rows:
                if args.ultralytics_python or row not in ULTRALYTICS:
                    run_row(folder, row, seed, args)
                    write_tables(args.output)
    print((args.output / "table.md").read_text())


def run_row(folder: Path, row: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train a row with a seed unless it is finished, and return its result."""
    is_matched, data, options = row in MATCHED | ULTRALYTICS, folder / "data", ROWS[row]
    epochs = None if is_matched else args.epochs
    name = f"{row}_{epochs}_epochs" if epochs else row
    run = folder / f"{name}_{seed}"
    if (run / "result.json").exists():
        return json.loads((run / "result.json").read_text())
    # An interrupted run starts again.
    shutil.rmtree(run, ignore_errors=True)
    default = run_row(folder, DEFAULT, seed, args) if is_matched or "{" in options else {}
    if "{" in options:
        size = default["image_size"]
        options = options.format(size=size, larger=size + 64, longest=round(size * 5 / 3))
    program = Ultralytics(data, options, args.ultralytics_python) if row in ULTRALYTICS else Vil(data, options)
    if is_matched:
        trial = program.train(run / "trial", seed, program.trial_epochs)
        seconds_per_epoch = (trial["cpu_seconds"] - trial["start_cpu_seconds"]) / program.trial_epochs
        epochs = max(round((default["cpu_seconds"] - trial["start_cpu_seconds"]) / seconds_per_epoch), 1)
    result = {"dataset": folder.name, "row": name, "seed": seed, **program.train(run, seed, epochs)}
    result["inference_cpu_ms"] = None if row in ABLATIONS else inference_ms(program, run)
    (run / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def write_tables(output: Path) -> None:
    """Write the means over the seeds of all finished runs to ``table.md`` and ``table.json``."""
    results, table = [json.loads(path.read_text()) for path in sorted(output.glob("*/*/result.json"))], []
    for dataset, row in dict.fromkeys((result["dataset"], result["row"]) for result in results):
        group = [result for result in results if (result["dataset"], result["row"]) == (dataset, row)]
        means = {"dataset": dataset, "row": row, "seeds": len(group)}
        for column in COLUMNS:
            values = [result[column] for result in group if result[column] is not None]
            means[column] = statistics.mean(values) if values else None
        lowest, highest = (choose(result["AP"] for result in group) for choose in (min, max))
        table.append(means | {"AP_lowest": lowest, "AP_highest": highest})
    table.sort(key=lambda means: (means["dataset"], -means["AP"]))
    (output / "table.json").write_text(json.dumps(table, indent=1))
    headers = {"dataset": "dataset", "row": "row", "seeds": "seeds", **COLUMNS}
    headers |= {"AP_lowest": "lowest AP", "AP_highest": "highest AP"}
    text = tabulate(table, headers, tablefmt="github", floatfmt=".1f")
    (output / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
