"""What faults are injected into: two configs, data, a run of seconds and its export."""

import shutil
from pathlib import Path

from projects_vil.data import write_shapes_dataset
from tests.projects_vil.helpers import ROOT, run_tool, small_config

_TRAINING = [
    *("MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1_rpb", "OUTPUT_DIR", "output", "SEED", "5"),
    *("SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "2", "SOLVER.WARMUP_ITERS", "0"),
    *("INPUT.MIN_SIZE_TRAIN", "(48,)", "MODEL.DEVICE", "cpu"),
]
CONFIGS = {"small.yaml": "retinanet", "mask.yaml": "mask_rcnn"}


def make_world(folder: Path, *, with_run: bool = True) -> None:
    """Fill an empty folder, with the run and its export or without them."""
    for name, detector in CONFIGS.items():
        (folder / name).write_text(small_config(detector, *_TRAINING).dump())
    (folder / "configs").symlink_to(ROOT / "configs")
    shapes = folder / "datasets/shapes"
    write_shapes_dataset(shapes, num_train=16, num_val=8, short_side=64)
    (folder / "own").mkdir()
    shutil.copytree(shapes / "val", folder / "own/images")
    shutil.copy(shapes / "annotations/instances_val.json", folder / "own/annotations.json")
    (folder / "photos").mkdir()
    for name, path in zip("ab", sorted((shapes / "val").iterdir()), strict=False):
        shutil.copy(path, folder / f"photos/{name}.jpg")
    if not with_run:
        return
    _run(folder, "train_net.py", "--config-file", "small.yaml", "OUTPUT_DIR", "run")
    _run(
        folder,
        "export_model.py",
        "--config-file",
        "run/config.yaml",
        "--weights",
        "run/model_final.pth",
        "--output",
        "export",
    )


def _run(folder: Path, name: str, *arguments: str) -> None:
    result = run_tool(name, *arguments, datasets_root=folder / "datasets", root=folder)
    assert result.returncode == 0, result.stderr
