"""The research benchmarks: valid synthetic annotations, equal results of both APIs, and hand counts of operators."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from projects_vil.data import CocoFile
from research.benchmarks import annotations, prediction
from research.benchmarks.annotations import NUM_OBJECTS, cost_of_evaluation, write_annotations, write_images
from research.benchmarks.prediction import format_predictions, measure_predictions
from research.benchmarks.roofline import DeviceRates, lower_bound
from tests.projects_vil.helpers import ROOT, message, run_tool


def test_synthetic_annotations_pass_the_check(tmp_path):
    write_annotations(tmp_path / "annotations.json", np.random.default_rng(0), 20)
    write_images(tmp_path / "images", 20)
    file = CocoFile(tmp_path / "annotations.json", tmp_path / "images", pixels=True)
    assert len(file.images) == 20 and len(file.annotations) == 20 * NUM_OBJECTS and file.masks
    assert not file.findings("error", "fixed")


@pytest.mark.slow
def test_memory_of_boxes():
    """As lists of dicts, the boxes of an image would need more than 12 kB."""
    rows = annotations.cost_of_reading(num_images=30_000)
    for small, large in zip(rows[:2], rows[2:], strict=True):
        assert (large["peak"] - small["peak"]) / (large["images"] - small["images"]) < 8000


@pytest.mark.slow
def test_program(tmp_path):
    program, path = "../research/benchmarks/__main__.py", tmp_path / "figures.json"
    _, out, _ = run_tool(program, "dataset-check", "--images", 20, "--json", path)
    assert json.loads(path.read_text())["file_size"] > 20 * 7 * 100 and out.startswith("20 images")
    words = ["vil_tiny_1_1_3_1_rpb", "--against", "r50", "--image-size", 64, 96, "--runs", 1, "--backward"]
    _, out, _ = run_tool(program, "roofline", *words, "--json", path, "MODEL.DEVICE", "cpu")
    rows = json.loads(path.read_text())["measurements"]
    assert [row["model"] for row in rows] == ["vil_tiny_1_1_3_1_rpb", "r50"] and "GFLOP/s" in out
    assert all(sum(row["limit"].values()) > 0 for row in rows)


def test_cost_of_an_evaluation():
    assert cost_of_evaluation(num_images=6, num_detections=20)["metrics"]["AP"] > 10


def test_modes_of_prediction(monkeypatch):
    """Ray is left out, because its cluster starts slowly. A fake process takes one second per image."""
    commands = []

    def run(words, env):
        commands.extend(words)
        return float(len(list(Path(words[0][2]).iterdir()))), 1e8

    monkeypatch.setattr(prediction, "_run", run)
    monkeypatch.setattr(prediction, "find_spec", lambda name: None)
    rows = measure_predictions("run", num_images=60, batch_size=4, runs=1, overrides=["SEED", "1"])
    names = [row["name"] for row in rows]
    assert names == ["one image at a time", "batches of 4", "batches of 4, bfloat16", "two shards on this machine"]
    assert all((row["images_per_second"], row["start"], row["memory"]) == (1, 0, 1e8) for row in rows)
    assert all(name in format_predictions(rows) for name in names)
    assert len(commands) == 10 and all("--format" in words and words[-2:] == ("SEED", "1") for words in commands)


@pytest.mark.slow
def test_a_prediction_that_fails(tmp_path):
    assert "does not exist" in message(measure_predictions, str(tmp_path / "none"), num_images=10, batch_size=1, runs=1)


# -- roofline ----------------------------------------------------------------------------------------


A, B = torch.rand(8, 4), torch.rand(4, 6)
TARGET = torch.rand(8, 4)
# An index of 8 bytes counts as two float32 values.
ROW = torch.tensor([1])


def test_work_of_an_operator():
    """At one FLOP or one byte per second, the bound in seconds equals the count by hand."""
    rates = DeviceRates(flops=1.0, bytes=1e30, call=0.0)
    for step, flops, numbers in (
        (lambda: A @ B, 2 * 8 * 4 * 6, 8 * 4 + 4 * 6 + 8 * 6),
        (lambda: A.t() @ A, 2 * 4 * 8 * 4, 2 * 8 * 4 + 4 * 4),
        (lambda: A.add_(0), 0, 2 * 8 * 4),
        (lambda: A[:, :1].expand(-1, 4) + 1, 0, 8 + 8 * 4),
        (lambda: A.view(4, 8).transpose(0, 1).detach(), 0, 0),
        (lambda: TARGET.copy_(A), 0, 2 * 8 * 4),
        (lambda: torch.zeros_like(A), 0, 8 * 4),
        (lambda: A[ROW], 0, 4 + 2 + 4),
        (lambda: A.gather(0, ROW[:, None]), 0, 1 + 2 + 1),
        (lambda: TARGET.index_put_((ROW,), A[:1]), 0, 4 + 2 + 4),
        (lambda: TARGET.index_put_((ROW,), A[:1], accumulate=True), 0, 4 + 2 + 2 * 4),
        # Overlapping windows share memory.
        (lambda: A.view(-1).unfold(0, 4, 1) + 1, 0, 8 * 4 + 29 * 4),
    ):
        arithmetic = lower_bound(step, rates)
        memory = lower_bound(step, DeviceRates(flops=1e30, bytes=1.0, call=0.0))
        assert arithmetic["limit"]["arithmetic"] == pytest.approx(flops)
        assert memory["limit"]["memory"] == pytest.approx(4 * numbers) and memory["operators"] == bool(numbers)
    in_place = lower_bound(lambda: torch.zeros(2, 8, 6).baddbmm_(A.expand(2, -1, -1), B.expand(2, -1, -1)), rates)
    assert in_place["limit"]["arithmetic"] == pytest.approx(2 * 2 * 8 * 4 * 6)


def test_small_operators_are_bound_by_their_calls():
    work = lower_bound(lambda: (A + 1).mul_(2), DeviceRates(flops=1e30, bytes=1e30, call=0.5))
    assert work["limit"] == {"arithmetic": 0, "memory": 0, "overhead": 1.0} and work["operators"] == 2


@pytest.mark.slow
def test_gpu_script_runs_on_a_cpu(tmp_path):
    name = "vil_tiny_1_1_3_1_rpb"
    options = ["--device", "cpu", "--small", "--models", name, "--steps", "versions", "correctness", "profile"]
    command = [sys.executable, "-m", "research.benchmarks.gpu", *options, "--output", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    assert result.returncode == 0
    steps = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert steps["versions"]["torch"] == torch.__version__
    errors = steps["correctness"][name]["float32"]["sdpa"]
    assert errors["features"] < 1e-5 and errors["gradients"] < 1e-4
    assert steps["profile"].keys() == {"swin_t", "r50", f"{name} triton", f"{name} sdpa"}
