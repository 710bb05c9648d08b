"""List the published results of this project's models, the commands that reproduce them, and the results of your runs.

The published results are from the first comments of configs/ (COCO val2017) and from the model zoo (ImageNet-1K top-1).
"measured" is the result of a detector in --runs, in the folder RUNS/DETECTOR/CONFIG, as in the commands.

--hours adds the estimated hours on 8 H200 GPUs. A training step of Mask R-CNN with vil_small_rpb takes 0.159 s for 2
images in bfloat16 (docs/performance.md). The estimate is proportional to the multiply-adds of the detector. Counting
them takes minutes.

Example:
    python -m research.reproduce
    python -m research.reproduce --select vil_small --runs /data/runs --hours
"""

import argparse
import functools
import re
from pathlib import Path
from typing import Any

from tabulate import tabulate

from projects_vil import load_config
from projects_vil.analysis import count_detector
from projects_vil.checkpoint.zoo import ZooEntry, read_zoo
from projects_vil.evaluation import EVALUATION_FILE
from projects_vil.files import read_json
from vil.choices import CONFIGS

# "box / mask AP 42.9 / 39.6 in LIT Table 7." or "42.5 / 39.2 in the official repository's README (...)"
_FIGURE = re.compile(r"(\d\d\.\d)(?: / (\d\d\.\d))? in ([^(,]+?)(?= \(|,|\. |\.$)")
REFERENCE = "mask_rcnn/vil_small_rpb_1x"
REFERENCE_SECONDS = 0.159  # a training step of REFERENCE, 2 images of 800 x 1333
IMAGES_PER_GPU = 2
NUM_GPUS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of the runs (default runs)")
    add("--select", default="", metavar="TEXT", help="only rows with this text in their name")
    add("--hours", action="store_true", help="estimate the hours on 8 H200 GPUs")
    args = parser.parse_args()
    rows = [row for row in [*detectors(args.runs), *classifiers(args.runs)] if args.select in row["name"]]
    if not rows:
        parser.error(f"no row has '{args.select}' in its name")
    if args.hours:
        reference = multiply_adds(REFERENCE)
        for row in rows:
            if "iterations" in row:
                # The schedule does not change the model.
                steps = row["iterations"] * row["images"] / (NUM_GPUS * IMAGES_PER_GPU)
                seconds = REFERENCE_SECONDS * multiply_adds(row["name"].replace("3x_ms", "1x")) / reference
                row["hours"] = f"{steps * seconds / 3600:.0f}"
    columns = ["name", "published", "source", "measured", *["hours"] * args.hours]
    print(
        tabulate(
            [[row.get(column, "") for column in columns] for row in rows],
            columns,
            tablefmt="github",
            disable_numparse=True,
        )
    )
    print("\nCommands, each for a machine with 8 GPUs:")
    for row in rows:
        print(f"\n# {row['name']}: {row['published']}\n{row['command']}")


def detectors(runs: Path) -> list[dict[str, Any]]:
    """Return a row for each config with a published AP."""
    zoo, rows = read_zoo(), []
    for path in sorted([*CONFIGS.glob("retinanet/*.yaml"), *CONFIGS.glob("mask_rcnn/*.yaml")]):
        comment = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        figures = _FIGURE.findall(comment.partition("Published, not measured here:")[2])
        if not figures:
            continue
        name, cfg = f"{path.parent.name}/{path.stem}", load_config(path)
        run = runs / name
        rows.append(
            {
                "name": name,
                "published": ", ".join(f"{box} / {mask}" if mask else box for box, mask, _ in figures),
                "source": ", ".join(source for _, _, source in figures),
                "measured": measured(run),
                "iterations": cfg.SOLVER.MAX_ITER,
                "images": cfg.SOLVER.IMS_PER_BATCH,
                "command": f"python tools/train_net.py --config-file configs/{name}.yaml --num-gpus {NUM_GPUS} "
                f"MODEL.WEIGHTS {initial_weights(cfg.MODEL.TRANSFORMER.VARIANT, zoo, name)} OUTPUT_DIR {run} "
                "SOLVER.AMP.ENABLED True",
            }
        )
    return rows


def classifiers(runs: Path) -> list[dict[str, Any]]:
    """Return a row for each official classifier with its top-1 accuracy."""
    rows = []
    for name, entry in read_zoo().items():
        if "top1" in entry.figures and ":" not in entry.variant:
            size = f" --img-size {entry.img_size}" if entry.img_size else ""
            rows.append(
                {
                    "name": name,
                    "published": f"{entry.figures['top1']} top-1",
                    "source": entry.group["source"].partition("/blob/")[0],
                    "command": f"torchrun --nproc_per_node {NUM_GPUS} examples/timm_run.py train.py --model "
                    f"{entry.variant}{size} --data-dir imagenet --output {runs / 'classifiers'} --experiment {name}",
                }
            )
    return rows


def initial_weights(variant: str, zoo: dict[str, ZooEntry], config: str) -> str:
    """Return the name of the official detector's initial weights in the zoo, or a file name if they are unreachable."""
    trained_on = next((entry.group["trained_on"] for entry in zoo.values() if entry.config == config), "ImageNet-1K")
    pretraining = "22K" if "21K" in trained_on else "1K"
    variant = variant.removesuffix("_ws4")  # the size of LITv2's windows does not change the weights
    for name, entry in zoo.items():
        is_same = entry.variant == variant and "top1" in entry.figures and entry.img_size in (None, 224)
        if is_same and (pretraining == "1K") == entry.group["trained_on"].startswith("ImageNet-1K"):
            return f"{name}.pth" if "unreachable" in entry.group else name
    return f"{variant}.pth"


def measured(run: Path) -> str:
    """Return the box and mask AP in the evaluation of a run, or an empty string."""
    if not (run / EVALUATION_FILE).is_file():
        return ""
    tasks = next(iter(read_json(run / EVALUATION_FILE).values()))
    values = [tasks[task]["AP"] for task in ("bbox", "segm") if task in tasks]
    return " / ".join("undefined" if value is None else f"{value:.1f}" for value in values)


@functools.cache
def multiply_adds(config: str) -> float:
    """Return the multiply-adds of a detector on an image of 800 x 1333."""
    return count_detector(load_config(CONFIGS / f"{config}.yaml"), config, size=(800, 1333), with_flops=True)["flops"]


if __name__ == "__main__":
    main()
