"""The search for a recipe with Optuna. The trials are replaced by a function of their config keys."""

import pytest

from projects_vil import load_config
from tests.projects_vil.helpers import message

pytest.importorskip("optuna", reason="optuna is not installed: pip install -e '.[tune]'")

from projects_vil import tune  # noqa: E402  # needs optuna

# Takes the place of vil: writes a config, and two evaluations with an AP that is high for a low learning rate.
TRAIN = """
import json, sys
from pathlib import Path
words = [*sys.argv, "SOLVER.BASE_LR", "0.001"]
folder, rate = Path(words[words.index("--output") + 1]), float(words[words.index("SOLVER.BASE_LR") + 1])
if rate > 0.004:
    sys.exit("the loss is not finite")
folder.mkdir()
(folder / "config.yaml").write_text(Path("config.yaml").read_text() + f"SOLVER: {{BASE_LR: {rate}}}")
(folder / "metrics.json").write_text("".join(json.dumps({"bbox/AP": ap / rate}) + "\\n" for ap in (0.1, 0.2)))
"""


def test_the_best_config_of_a_resumed_search(tmp_path, monkeypatch, capsys):
    (tmp_path / "vil").mkdir()
    (tmp_path / "vil/__init__.py").touch()
    (tmp_path / "vil/__main__.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text("OUTPUT_DIR: trial\nTEST: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "_SECONDS_BETWEEN_READS", 0.05)
    options = {"metric": "bbox/AP", "words": ["--epochs", "1"], "given": {"SEED": "1"}}
    for trials in (2, 5):
        tune.tune("photos", tmp_path / "out", trials=trials, **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial")]
    assert [line.split()[1] for line in lines] == [f"{number}:" for number in range(5)]
    assert lines[0].endswith("with the recipe") and "SOLVER.BASE_LR" in lines[1]
    best = load_config(tmp_path / "out/best.yaml")
    rates = [load_config(path).SOLVER.BASE_LR for path in (tmp_path / "out").glob("trial_*/config.yaml")]
    assert len(set(rates)) == len(rates) > 2 and best.SOLVER.BASE_LR == min(rates) and best.OUTPUT_DIR != "trial"
    assert "of a run" in message(tune.tune, "photos", tmp_path, trials=5, **options)
    assert "other arguments" in message(tune.tune, "other", tmp_path / "out", trials=5, **options)
