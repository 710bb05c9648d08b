"""A dry run of ``make gpu``, so that no minute on a GPU is lost to a mistake in its script."""

import json

import pytest

from research.benchmarks import gpu

NAME = "vil_tiny_1_1_3_1_rpb"


@pytest.mark.slow
def test_every_step_writes_its_results(run_on_mock, tmp_path):
    run_on_mock("run_gpu_script.py", "--small", "--models", NAME, "--output", tmp_path)
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.json")}
    assert texts.keys() == gpu.STEPS.keys() and not [name for name, text in texts.items() if '"error"' in text]
    results = {name: json.loads(text) for name, text in texts.items()}
    assert results["versions"]["capability"] == [9, 0] and results["sizes"].keys() >= {f"{NAME} triton"}
    # Values on this GPU are zeros.
    errors = [results["correctness"][NAME][dtype][b] for dtype in gpu.DTYPES for b in ("triton", "sdpa")]
    assert [error["features"] for error in errors] == [0] * 6
    assert len(results["attention"]) == 4 and len(results["sweep"][f"{NAME} stage1"]) == 2
    assert all(step["memory_gb"] > 0 for steps in results["backbones"].values() for step in steps.values())
