"""The training loop in the processes of Ray Train."""

import os
import subprocess
import sys

import pytest

from tests.projects_vil.engine.test_resuming import RUN
from tests.projects_vil.helpers import CONFIGS, PATIENCE, ROOT, SMALL

pytestmark = pytest.mark.slow


def test_two_workers_of_ray_train_a_detector(datasets_root, tmp_path):
    pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'ray[train]'")
    command = [sys.executable, "examples/ray_train.py", "--config-file", str(CONFIGS["retinanet"]), *SMALL["retinanet"]]
    command += [*RUN, "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path / "run")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "DETECTRON2_DATASETS": str(datasets_root)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model_final.pth").exists()
    assert "in 2 processes" in (tmp_path / "run/log.txt").read_text()
