"""The exit status, error line and files of commands with wrong input, killed processes and full disks.

Each case runs a command in a separate folder. A mistake of the user ends with one ``error:`` line that has the file,
key or value. No case changes an existing file, or leaves a temporary file or a lock.
"""

import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from examples.make_shapes_dataset import write_shapes_dataset
from tests.projects_vil import helpers
from tests.projects_vil.helpers import PATIENCE, ROOT, contents_of, last_child, run_tool, small_config, start_tool
from tests.selection import slow_except

TRAIN = "train_net.py --config-file small.yaml"
LONG = f"{TRAIN} SOLVER.MAX_ITER 4000 SOLVER.CHECKPOINT_PERIOD 1 SOLVER.CHECKPOINT_MAX_TO_KEEP 2"
WORKER = f"{LONG} DATALOADER.NUM_WORKERS 1"
RUN = "--config-file run/config.yaml --weights run/model_final.pth"
PREDICT, EXPORT = f"predict.py {RUN} --output out", f"export_model.py {RUN} --output out"
RESUME = "train_net.py --config-file run/config.yaml --resume"
ANNOTATIONS = "mine/annotations.json"
CHECK = f"check_dataset.py {ANNOTATIONS} --images mine/images"
FINAL, SHAPES = "run/model_final.pth", "datasets/shapes/annotations/instances_train.json"
IMAGES, URL = "datasets/shapes/train/*.jpg", "http://127.0.0.1:9/w.pth"
# Files that a run writes, and files that a resumed run overwrites.
OUTPUT = ("output", "output/*")
RESUMED = tuple(f"run/{name}" for name in ("log.txt", "config.yaml", "metrics.json", "evaluation.json", "model_*.pth"))
RESUMED += ("run/last_checkpoint", "run/events.*", "run/inference/*")
FULL_DISK = 200_000


@dataclass(frozen=True)
class Case:
    """A command and its error.

    Attributes:
        command: The tool and its arguments.
        corrupt: Changes the folder before the command runs.
        named: Text in the error line, or in the output if the exit status is 0.
        status: The exit status.
        writes: Patterns of files that the command may create or change.
        when: Returns whether it is time for ``send``.
        send: A signal for the process, or a function that is called with the process id.
        limit: Maximum size of a file in bytes. It simulates a full disk.
    """

    command: str
    corrupt: Callable[[Path], object] | None = None
    named: str = ""
    status: int = 1
    writes: tuple[str, ...] = ()
    when: Callable[[Path], object] | None = None
    send: int | Callable[[int], None] | None = None
    limit: int | None = None

    @property
    def needs_run(self) -> bool:
        return bool(re.search(r"\b(run|export)/|report.py run", self.command))


# -- corruptions of files ----------------------------------------------------------------------------------------------


def write(name: str, content: str | bytes = "") -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: ((folder / name).parent.mkdir(exist_ok=True, parents=True), (folder / name).write_bytes(data))


def replace_by(pattern: str, make: Callable[[Path], object] | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for path in sorted(folder.glob(pattern)):
            path.unlink()
            if make is not None:
                make(path)

    return change


def has_saved(folder: Path) -> bool:
    return (folder / "output/last_checkpoint").exists()


def has_drawn(folder: Path) -> bool:
    return any(folder.glob("out/drawings/*"))


def to_a_child(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(last_child(pid), number)


# -- the cases ---------------------------------------------------------------------------------------------------------

CASES = {
    # Arguments and configs
    "value out of range": Case(f"{TRAIN} SOLVER.MAX_ITER 0", named="SOLVER.MAX_ITER"),
    "output directory that is a file": Case(f"{TRAIN} OUTPUT_DIR small.yaml", named="OUTPUT_DIR"),
    "too many processes": Case(f"{TRAIN} --num-gpus 999", named="999"),
    # Data
    "annotations that are a pipe": Case(TRAIN, replace_by(SHAPES, os.mkfifo), SHAPES),
    "annotations with a key twice": Case(CHECK, write(ANNOTATIONS, '{"images": 1, "images": 2}'), "'images'"),
    "fix over a file": Case(f"{CHECK} --fix small.yaml", named="small.yaml", status=2),
    # A new OUTPUT_DIR is deleted.
    "images that are gone": Case(TRAIN, replace_by(IMAGES, None), ".jpg"),
    "images that are gone, and a folder with a file": Case(
        f"{TRAIN} OUTPUT_DIR mine", replace_by(IMAGES, None), ".jpg", writes=("mine/log.txt",)
    ),
    "images that are all unreadable": Case(
        f"{TRAIN} DATALOADER.NUM_WORKERS 1 DATASETS.CHECK off", replace_by(IMAGES, Path.touch), ".jpg", writes=OUTPUT
    ),
    "findings over their own input": Case(f"{CHECK} --json {ANNOTATIONS}", named="--json", status=2),
    # Weights and runs
    "weights at a server that is not there": Case(
        f"train_net.py --config-file run/config.yaml --eval-only MODEL.WEIGHTS {URL}", None, URL, 1, ("run/log.txt",)
    ),
    "a resume with nothing to train": Case(f"{RESUME} SOLVER.MAX_ITER 2", None, "nothing is trained", 0, RESUMED),
    "another optimizer": Case(f"{RESUME} SOLVER.OPTIMIZER SGD SOLVER.MAX_ITER 6", None, "SOLVER", 1, ("run/log.txt",)),
    "report with a misspelled key": Case("report.py run SOLVER.BSE_LR 0.1", named="SOLVER.BASE_LR"),
    # Prediction and exports
    "drawing over another file": Case(f"{PREDICT} --input photos", write("out/drawings/a.jpg"), "already exists"),
    "int8 in a format without it": Case(f"{EXPORT} --precision int8", named="int8"),
    # Disks, memory and signals
    "full shared memory": Case(
        f"{TRAIN} DATALOADER.NUM_WORKERS 1 INPUT.MIN_SIZE_TRAIN (640,)", None, "NUM_WORKERS", 1, OUTPUT, limit=FULL_DISK
    ),
    "full disk, checkpoint": Case(TRAIN, named="model", writes=OUTPUT, limit=FULL_DISK),
    "full disk, export": Case(EXPORT, named="out", writes=("out",), limit=FULL_DISK),
    "full disk, predictions": Case(f"{PREDICT} --input photos", named="out", writes=("out", "out/*"), limit=2000),
    "full disk, fixed annotations": Case(f"{CHECK} --fix clean", named="clean/", limit=2000),
    "SIGTERM at the start": Case(
        LONG, None, "SIGTERM", 143, OUTPUT, lambda folder: (folder / "output").exists(), signal.SIGTERM
    ),
    "SIGTERM in a prediction": Case(
        f"{PREDICT} --input datasets", None, "SIGTERM", 143, ("out", "out/drawings*"), has_drawn, signal.SIGTERM
    ),
    "SIGHUP in an export": Case(
        EXPORT, None, "SIGHUP", 129, (), lambda folder: list(folder.glob("out/.*")), signal.SIGHUP
    ),
    "SIGUSR1 in a run": Case(LONG, None, "SIGUSR1: saved", 138, OUTPUT, has_saved, signal.SIGUSR1),
    "SIGTERM to a loading process": Case(
        WORKER, None, "SIGTERM: saved", 143, OUTPUT, has_saved, to_a_child(signal.SIGTERM)
    ),
    "killed loading process": Case(WORKER, None, "", 1, OUTPUT, has_saved, to_a_child(signal.SIGKILL)),
}
FAST = [
    name for name, case in CASES.items() if not (case.needs_run or case.send or case.limit or OUTPUT[1] in case.writes)
]


def make_folder(folder: Path) -> None:
    """Create datasets, a config and photos in a folder."""
    training = ["MODEL.TRANSFORMER.VARIANT", "vil_tiny_1_1_3_1_rpb", "OUTPUT_DIR", "output", "SEED", "5"]
    training += ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2"]
    training += ["SOLVER.WARMUP_ITERS", "0", "INPUT.MIN_SIZE_TRAIN", "(48,)", "MODEL.DEVICE", "cpu"]
    (folder / "small.yaml").write_text(small_config("retinanet", *training).dump())
    (folder / "configs").symlink_to(ROOT / "configs")
    shapes = folder / "datasets/shapes"
    write_shapes_dataset(shapes, num_train=16, num_val=8, short_side=64)
    shutil.copytree(shapes / "val", folder / "mine/images")
    shutil.copy(shapes / "annotations/instances_val.json", folder / "mine/annotations.json")
    (folder / "photos").mkdir()
    for name, path in zip("ab", sorted((shapes / "val").iterdir()), strict=False):
        shutil.copy(path, folder / f"photos/{name}.jpg")


def make_folder_with_run(folder: Path) -> None:
    make_folder(folder)
    export = ["--config-file", "run/config.yaml", "--weights", FINAL, "--output", "export"]
    for name, *arguments in (
        ("train_net.py", "--config-file", "small.yaml", "OUTPUT_DIR", "run"),
        ("export_model.py", *export),
    ):
        result = run_tool(name, *arguments, datasets_root=folder / "datasets", root=folder)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", slow_except(CASES, FAST))
def test_an_error_is_one_line_and_leaves_files_as_they_were(name, made_once, tmp_path):
    case, folder, logs = CASES[name], tmp_path / "folder", tmp_path / "logs"
    template = ("error_cases_with_run", make_folder_with_run) if case.needs_run else ("error_cases", make_folder)
    shutil.copytree(made_once(*template), folder, symlinks=True)
    logs.mkdir()
    if case.corrupt is not None:
        case.corrupt(folder)
    before = contents_of(folder)
    tool, *arguments = shlex.split(case.command)
    options = {"datasets_root": folder / "datasets", "root": folder}
    if case.send is None and case.limit is None:
        status, *streams = run_tool(tool, *arguments, **options)
    else:
        process = start_tool(tool, *arguments, folder=logs, file_size=case.limit, **options)
        if case.send is not None:
            helpers.wait_for(lambda: case.when(folder) or not process.is_alive())
            os.kill(process.pid, case.send) if isinstance(case.send, int) else case.send(process.pid)
        process.join(PATIENCE)
        status = process.exitcode
        streams = [(logs / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    output = "".join(streams)
    assert status == case.status, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    # The names of skipped files are printed before the last line of the progress bar.
    is_error = case.status in (1, 2) and not case.send and not (case.status == 2 and case.writes)
    assert case.named in (last if is_error else output), output
    if case.status == 1 and not case.send:
        assert last.startswith("error: "), output
    after = contents_of(folder)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    unexpected = {path for path in changed if not any(fnmatch(path, pattern) for pattern in case.writes)}
    assert not unexpected
    assert not [path for path in after if path not in before and Path(path).name.startswith(".")]
