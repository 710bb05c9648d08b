"""examples/ray_train.py: two Ray workers train as two processes of tools/train_net.py."""

import json
import os
import subprocess
import sys

import pytest

from tests.projects_vil.helpers import CONFIGS, EXACT_TRAINING, PATIENCE, ROOT, SMALL, run_tool

pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'ray[train]'")


@pytest.mark.slow
def test_two_workers_train_as_two_processes(datasets_root, short_ray_folder, tmp_path):
    words = ["--config-file", CONFIGS["retinanet"], *SMALL["retinanet"], *EXACT_TRAINING]
    words += ["SOLVER.MAX_ITER", "2", "OUTPUT_DIR"]
    assert (
        run_tool("train_net.py", "--num-gpus", "2", *words, tmp_path / "b", datasets_root=datasets_root).returncode == 0
    )
    command = [sys.executable, ROOT / "examples/ray_train.py", "--num-workers", "2", *words, tmp_path / "a"]
    # Ray writes into the home folder too.
    env = {"PYTHONPATH": str(ROOT), "DETECTRON2_DATASETS": str(datasets_root), "HOME": str(tmp_path)}
    subprocess.run(list(map(str, command)), env=os.environ | env, timeout=PATIENCE, check=True)
    ours, theirs = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["shapes_val"]["bbox"] for name in "ab"
    )
    ours, theirs = ({key: x for key, x in found.items() if isinstance(x, float)} for found in (ours, theirs))
    # Points of average precision, which rounding changes.
    assert ours == pytest.approx(theirs, abs=1, nan_ok=True)
