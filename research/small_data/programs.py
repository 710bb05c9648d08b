"""Train, evaluate and measure `vil` and ultralytics, each as a program with one CPU thread.

ultralytics (AGPL) is not a dependency. It runs with the Python interpreter of its own environment.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from projects_vil import load_config

# Both programs print these words before the first iteration.
START_MESSAGE = "Starting training"
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONUNBUFFERED"), "1")
_ENVIRONMENT |= {"MPLBACKEND": "Agg", "YOLO_OFFLINE": "True", "YOLO_AUTOINSTALL": "False"}


class Usage(NamedTuple):
    """CPU time and memory of a program.

    Attributes:
        cpu_seconds: User and system time with child processes.
        start_cpu_seconds: The part of it before the first training iteration; None if the program does not train.
        peak_gb: Largest resident memory of its largest process in GB.
    """

    cpu_seconds: float
    start_cpu_seconds: float | None
    peak_gb: float


def run_program(command: Sequence[str | Path], log: Path) -> Usage:
    """Run a program with one thread, write its output to a file, and return its CPU time and memory.

    Raises:
        SystemExit: If the program fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | _ENVIRONMENT | {"YOLO_CONFIG_DIR": str(log.parent)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process, start = subprocess.Popen([*map(str, command)], env=environment, **output), None
    with log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            if start is None and START_MESSAGE in line:
                # User and system time of the process and of its finished child processes (man proc_pid_stat)
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                start = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: {shlex.join(map(str, command))} failed. Its messages are in '{log}'.")
    # ru_maxrss is in kilobytes on Linux.
    return Usage(usage.ru_utime + usage.ru_stime, start, usage.ru_maxrss / 1e6)


class Vil:
    """`vil train` with options, on the dataset that ``prepare_dataset`` has written to ``data``."""

    trial_epochs = 1

    def __init__(self, data: Path, options: str) -> None:
        self.data, self.options = data, shlex.split(options)
        self.command = [sys.executable, "-m", "vil"]

    def train(self, folder: Path, seed: int, epochs: int | None) -> dict[str, Any]:
        """Train a detector and return the values of its row. Without ``epochs``, the recipe sets the length."""
        length = ["--epochs", epochs] if epochs else []
        options = ["--output", folder / "run", "--device", "cpu", *self.options, *length, "SEED", seed]
        usage = run_program([*self.command, "train", self.data / "coco", *options], folder / "train.log")
        ((_, results),) = json.loads((folder / "run/evaluation.json").read_text()).items()
        cfg = load_config(folder / "run/config.yaml")
        # The last evaluation has the number MAX_ITER.
        last = max(json.loads(line)["iteration"] for line in (folder / "run/metrics.json").open())
        epochs = min(last + 1, cfg.SOLVER.MAX_ITER) * cfg.SOLVER.IMS_PER_BATCH / _number_of_images(self.data)
        values = {name: results["bbox"][name] for name in ("AP", "AP50")} | {"image_size": cfg.INPUT.MIN_SIZE_TEST}
        return _row(values, epochs, usage, self.data)

    def predict(self, folder: Path, photos: Path) -> Usage:
        """Predict a photo or a folder of photos with the trained detector."""
        options = ["--output", folder / "predictions", "--device", "cpu", "--no-drawings"]
        return run_program([*self.command, "predict", folder / "run", photos, *options], folder / "predict.log")


class Ultralytics:
    """A model of ultralytics from random weights, with ultralytics' default settings except for ``options``."""

    # The first epoch and the end of a run take more CPU time than the other epochs.
    trial_epochs = 4

    def __init__(self, data: Path, options: str, python: Path) -> None:
        self.data, self.options = data, shlex.split(options)
        # The path is not resolved: the environment is the folder of the link to the interpreter.
        self.command = [python.absolute().parent / "yolo", "detect"]

    def train(self, folder: Path, seed: int, epochs: int) -> dict[str, Any]:
        """Train a detector and return the values of its row. The metrics are COCO's for the best checkpoint."""
        options = [f"data={self.data / 'yolo/data.yaml'}", f"project={folder}", *self.options, "device=cpu"]
        options += ["exist_ok=True", "workers=2", "plots=False"]
        fit = ["model=yolov8n.yaml", "pretrained=False", "name=run", f"epochs={epochs}", f"seed={seed}"]
        usage = run_program([*self.command, "train", *options, *fit], folder / "train.log")
        evaluation = [f"model={folder / 'run/weights/best.pt'}", "name=evaluation", "save_json=True"]
        run_program([*self.command, "val", *options, *evaluation], folder / "evaluation.log")
        metrics = coco_metrics(self.data / "coco/val.json", folder / "evaluation/predictions.json")
        return _row(metrics, len((folder / "run/results.csv").read_text().splitlines()) - 1, usage, self.data)

    def predict(self, folder: Path, photos: Path) -> Usage:
        """Predict a photo or a folder of photos with the trained detector."""
        options = [f"model={folder / 'run/weights/best.pt'}", f"source={photos}", *self.options]
        command = [*self.command, "predict", *options, "device=cpu", "save=False", f"project={folder}"]
        return run_program(command, folder / "predict.log")


def _row(values: dict[str, Any], epochs: float, usage: Usage, data: Path) -> dict[str, Any]:
    """Return the values of a row of the table."""
    seconds = usage.cpu_seconds - usage.start_cpu_seconds
    speed = epochs * _number_of_images(data) / seconds
    return values | usage._asdict() | {"epochs": epochs, "images_per_cpu_second": speed}


def _number_of_images(data: Path) -> int:
    """Return the number of training images."""
    return len(json.loads((data / "coco/train.json").read_text())["images"])


def inference_ms(program: Vil | Ultralytics, folder: Path) -> float:
    """Return the CPU time per photo in ms, from a run with all training photos and a run with one photo."""
    photos = sorted((program.data / "yolo/images/train").iterdir())
    many, one = (program.predict(folder, path).cpu_seconds for path in (photos[0].parent, photos[0]))
    return 1000 * (many - one) / (len(photos) - 1)


def coco_metrics(annotations: Path, predictions: Path) -> dict[str, float]:
    """Return AP and AP50 in percent of a JSON file with COCO predictions."""
    truth, rows = COCO(str(annotations)), json.loads(predictions.read_text())
    if not rows:
        return {"AP": 0.0, "AP50": 0.0}
    evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
    for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
        step()
    return {"AP": 100 * float(evaluation.stats[0]), "AP50": 100 * float(evaluation.stats[1])}
