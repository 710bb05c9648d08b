"""examples/ray_train.py: two Ray workers train as two processes of tools/train_net.py."""

import functools
import json

import pytest

from tests.projects_vil.helpers import CONFIGS, EXACT_TRAINING, ROOT, SMALL, run_tool


@pytest.mark.slow
def test_two_workers_train_as_two_processes(datasets_root, short_ray_folder, tmp_path, monkeypatch):
    pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'ray[train]'")
    import ray

    words = ["--config-file", CONFIGS["retinanet"], *SMALL["retinanet"], *EXACT_TRAINING]
    words += ["SOLVER.MAX_ITER", "2", "OUTPUT_DIR"]
    processes = run_tool("train_net.py", "--num-gpus", "2", *words, tmp_path / "b", datasets_root=datasets_root)
    assert processes.returncode == 0, processes.stderr
    # Ray writes into the home folder too.
    for name, value in {"PYTHONPATH": ROOT, "DETECTRON2_DATASETS": datasets_root, "HOME": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    options = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, **options))
    try:
        assert run_tool("../examples/ray_train.py", "--num-workers", "2", *words, tmp_path / "a")[0] == 0
    finally:
        ray.shutdown()
    both = (json.loads((tmp_path / name / "evaluation.json").read_text())["shapes_val"]["bbox"] for name in "ab")
    ours, theirs = ({key: x for key, x in found.items() if isinstance(x, float)} for found in both)
    # Points of average precision, which rounding changes.
    assert ours == pytest.approx(theirs, abs=1, nan_ok=True)
