"""tools/train_lra.py as a user runs it, and what it says where something is wrong."""

import json
import os
import runpy
import sys

import pytest
import torch

from tests.projects_vil.helpers import ROOT, error_line, run_tool

SHORT = [
    "--task",
    "listops",
    "--min-length",
    4,
    "--max-length",
    30,
    "--num-train",
    200,
    "--num-dev",
    30,
    "--num-test",
    40,
]
COURSE = ["--batch-size", 8, "--steps", 6, "--warmup", 2, "--lr", 1e-3, "--eval-every", 3]


@pytest.fixture
def said(monkeypatch, capsys):
    """The line that the tool ends with, run in this process, and its exit status."""

    def run(*args) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train_lra.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools/train_lra.py"), run_name="__main__")
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return end.value.code, line

    return run


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--model", "full"], ["--ablate", "window", "--drop-brackets"]], ids=str)
def test_a_run(tmp_path, more):
    places = ["--data", tmp_path / "data", "--output", tmp_path / "run", "--json", tmp_path / "run.json"]
    result = run_tool("train_lra.py", *SHORT, *COURSE, *places, *more)
    assert result.returncode == 0, result.stderr
    first, second, last = result.stdout.splitlines()
    assert first.startswith("step 3: train loss ") and second.startswith("step 6: ")
    figures = json.loads((tmp_path / "run.json").read_text())
    assert last.startswith(
        f"test accuracy {figures['test']['accuracy']:.4f} (chance {figures['chance']:.4f}), of step "
    )
    assert [evaluation["step"] for evaluation in figures["evaluations"]] == [3, 6]
    assert figures["arguments"]["task"] == "listops" and figures["arguments"]["max_length"] == 30
    assert figures["run"]["settings"]["sizes"]["window_size"] == (0 if "--ablate" in more else 16)
    assert "lra" in torch.load(tmp_path / "run/model_best.pth", weights_only=True)
    again = run_tool("train_lra.py", *SHORT, *COURSE, *places, *more)
    assert "is there already" in error_line(again)


@pytest.mark.slow
def test_reviews(tmp_path):
    for split in ("train", "test"):
        for name in ("pos", "neg"):
            (tmp_path / "aclImdb" / split / name).mkdir(parents=True)
            for number in range(8):
                (tmp_path / "aclImdb" / split / name / f"{number}_1.txt").write_text(f"{name} film {number} " * 5)
    result = run_tool("train_lra.py", "--task", "text", "--data", tmp_path, *COURSE)
    assert result.returncode == 0, result.stderr
    assert "(chance 0.5000)" in result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_measuring(tmp_path):
    arguments = ["--task", "listops", "--measure", "--lengths", 64, 128, "--runs", 1, "--json", tmp_path / "costs.json"]
    result = run_tool("train_lra.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 5
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert [(cost["length"], cost["model"]) for cost in costs] == [(n, m) for n in (64, 128) for m in ("ls", "full")]


def test_mistakes(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, status, text in (
        (["--task", "listop"], 2, "invalid choice: 'listop'"),
        ([], 2, "--task"),
        (["--task", "text", "--data", tmp_path / "none"], 1, "none/aclImdb/train/neg/*.txt: unpack"),
        (["--task", "retrieval"], 1, "datasets/lra/new_aan_pairs.train.tsv: unpack"),
        (["--task", "listops", "--released"], 1, "there is no datasets/lra/basic_train.tsv"),
        (["--task", "listops", "--released", "--min-length", 5], 1, "--min-length has no effect with --released"),
        (["--task", "text", "--num-train", 5], 1, "--num-train has no effect with a --task other"),
        (["--task", "text", "--drop-brackets"], 1, "--drop-brackets has no effect with"),
        (["--task", "listops", "--min-length", 300, "--max-length", 200], 1, "and so there is none"),
        ([*SHORT, "--num-dev", 0], 1, "--num-dev 0: it is 1 or more"),
        ([*SHORT, "--data-seed", -1], 1, "--data-seed -1: it is 0 or more"),
        ([*SHORT, "--steps", 100, "--warmup", 1000], 1, "--warmup 1000 --steps 100"),
        (["--task", "text", "--data", tmp_path / "none", "--steps", 5], 1, "neg/*.txt: unpack"),
        ([*SHORT, "--config", "projection", "--ablate", "projection"], 1, "a token sees nothing"),
        ([*SHORT, "--window-size", -3], 1, "window_size=-3"),
        ([*SHORT, "--lengths", 64], 1, "--lengths has no effect with training"),
        ([*SHORT, "--measure", "--output", "run"], 1, "--output has no effect with --measure"),
        ([*SHORT, "--measure"], 1, "--min-length has no effect with --measure"),
        ([*SHORT, "--ablate", "window", "--window-size", 8], 1, "--window-size has no effect with --ablate window"),
        ([*SHORT, "--ablate", "projection", "--rank", 8], 1, "--rank has no effect with --ablate projection"),
        ([*SHORT, "--model", "full", "--ablate", "window"], 1, "--ablate has no effect with --model full"),
        ([*SHORT, "--overwrite"], 1, "--overwrite has no effect with no --output"),
        ([*SHORT, *COURSE, "--warmup", 1], 1, "--warmup 1 --steps 6"),
        (["--task", "text", "--data", tmp_path / "none", "--output", "out"], 1, "neg/*.txt: unpack"),
        ([*SHORT, "--json", tmp_path / "none/a.json"], 1, "there is no folder"),
        ([*SHORT, "--device", "tpu"], 1, "--device is 'tpu': it is cpu or cuda"),
    ):
        found, line = said(*arguments)
        assert found == status and text in line, line
    # Nothing was begun.
    assert os.listdir(tmp_path) == []
