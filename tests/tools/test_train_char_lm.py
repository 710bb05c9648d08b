"""tools/train_char_lm.py as a user runs it."""

import json
import runpy
import sys

import pytest

from tests.projects_vil.helpers import ROOT, error_line, run_tool

TOOL = "train_char_lm.py"
SMALL = ["--layers", 1, "--dim", 16, "--heads", 2, "--window", 16, "--length", 32, "--batch-size", 2, "--steps", 6]
SMALL += ["--rate", "1e-2", "--eval-every", 3, "--device", "cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"All work and no play makes a dull text.\n" * 50)
    return path


@pytest.fixture
def mistake(monkeypatch, capsys):
    """The one line that the tool says about a mistake, in this process."""

    def run(*args) -> str:
        monkeypatch.setattr(sys, "argv", [TOOL, *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "tools" / TOOL), run_name="__main__")
        assert ended.value.code in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def test_mistakes_are_told_in_one_line(mistake, text, tmp_path):
    run, none = ["--data", text, "--output", tmp_path / "run", *SMALL], tmp_path / "none"
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"short")
    lines = {
        ("--output", none): "error: --data is missing: training needs it",
        ("--data", none, "--output", none): f"error: there is no text {none} (--data)",
        ("--data", tmp_path / "empty", "--output", none): "has 0 bytes: at least 100 make three parts",
        ("--data", tmp_path / "short", "--output", none): "has 5 bytes: at least 100 make three parts",
        ("--data", text, "--output", none, "--device", "cpu"): "longer text, or a smaller --batch-size or --length",
        (*run, "--config", "smal"): "argument --config: invalid choice: 'smal'",
        (*run, "--sample", 9, "--prompt", "play #"): "error: --prompt: byte 6, '#', is not in the text",
        (*run, "--prompt", "All"): "error: --prompt and --temperature are of a sample: add --sample N",
        (*run, "--sample", 9, "--temperature", 0): "error: --temperature 0.0: it is above 0",
        (*run, "--sample", 0): "error: --sample 0: it is 1 or more",
        (*run, "--weights", none): "error: --weights has no effect on training: leave it out",
        (*run, "--warm-up", 6): "error: phase 1: --warm-up 6 is not over in --steps 6: give a shorter one",
        (*run, "--test-memory", 17): "error: --test-memory 17: it is a multiple of the segment, 16",
        (*run, "--resume"): "error: there is no file",
        (*run, "--device", "gpu"): "error: --device is 'gpu': it is cpu or cuda",
        (*run, "--json", none / "found.json"): "there is no folder",
        ("--generate",): "error: --weights is missing: --generate needs it",
        ("--generate", "--weights", text): f"error: {text} is no checkpoint of tensors only",
        ("--measure", "--lengths", 100): "error: --lengths 100: it is a multiple of --segment 16",
        ("--measure", "--generate"): "not allowed with argument",
    }
    for arguments, said in lines.items():
        assert said in mistake(*arguments), arguments
    assert not none.exists() and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_train_resume_generate_and_evaluate(text, tmp_path):
    run, found = tmp_path / "run", tmp_path / "found.json"
    training = ["--data", text, "--output", run, *SMALL, "--compare", "full", "--json", found]
    result = run_tool(TOOL, *training, "--sample", 20, "--prompt", "All", fresh=True)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in run.iterdir()) == ["best_full.pth", "best_long_short.pth", "last.pth"]
    said = json.loads(found.read_text())
    assert [(line["kind"], line["step"]) for line in said["history"]] == [
        (kind, step) for step in (3, 6) for kind in ("long_short", "full")
    ]
    for one in said["results"]:
        assert one["sample"].startswith("All") and f"{one['parameters']:,}" in result.stdout
        assert f"{one['test']:.4f}" in result.stdout and one["sample"] in result.stdout
    assert "has a run already: --resume it" in error_line(run_tool(TOOL, *training))

    again = run_tool(TOOL, *training, "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads(found.read_text())["results"][0] == said["results"][0] | {"sample": None}

    weights = ["--weights", run / "best_full.pth", "--device", "cpu"]
    samples = [run_tool(TOOL, "--generate", *weights, "--sample", 50, "--seed", seed).stdout for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    testing = ["--data", text, "--test-memory", 64, "--test-part", 16, "--json", found]
    tested = run_tool(TOOL, "--evaluate", *weights, *testing)
    assert tested.returncode == 0, tested.stderr
    assert "in parts of 16 with a memory of 64" in tested.stdout
    assert json.loads(found.read_text())["test"] == pytest.approx(said["results"][1]["test"], abs=0.5)
    assert "is the state of a run" in error_line(run_tool(TOOL, "--generate", "--weights", run / "last.pth"))
