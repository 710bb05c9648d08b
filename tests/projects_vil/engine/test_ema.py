"""The exponential moving average: its values, and its use in evaluations, detectors and resumed runs."""

import json

import pytest
import torch

from examples.slim_checkpoint import slim_checkpoint
from projects_vil.checkpoint import load_detector
from projects_vil.data import register_datasets
from projects_vil.engine import Trainer
from projects_vil.engine.hooks import ExponentialAverage
from tests.projects_vil.engine.test_resuming import RUN, train
from tests.projects_vil.helpers import message, small_config

EMA = ["MODEL.EMA.ENABLED", "True", "MODEL.EMA.DECAY", "0.3", "TEST.VALIDATION_LOSS", "True", "TEST.BEST_METRIC", ""]
EMA += ["SOLVER.CHECKPOINT_PERIOD", "1", "SOLVER.MAX_ITER", "4", "TEST.EVAL_PERIOD", "0"]


@pytest.fixture(scope="module")
def run(made_once, datasets_root):
    """Train four iterations with a checkpoint after each."""

    def fill(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DETECTRON2_DATASETS", str(datasets_root))
            register_datasets(small_config())
            train("retinanet", folder, *EMA)

    return made_once("averaged_run", fill)


def test_the_average_follows_its_formula(run):
    """1/10, 2/11 and 3/12 are below the decay of 0.3. After the first step the average is the weights."""
    average = None
    for number, decay in enumerate((0.0, 2 / 11, 3 / 12, 0.3)):
        contents = torch.load(run / f"model_000000{number}.pth", weights_only=True)
        weights = {name: value.double() for name, value in contents["unaveraged_model"].items()}
        average = average or weights
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
        assert contents["averaged_steps"] == number + 1
        for name, value in contents["model"].items():
            torch.testing.assert_close(value.double(), average[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(contents["model"][name], contents["unaveraged_model"][name]) for name in average)


def test_steps_without_effect_are_not_averaged():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5)
    ours, theirs = (ExponentialAverage(model, decay=0.25) for _ in range(2))
    for has_stepped in (0.0, 1.0, 1.0, 0.0, 1.0):
        with torch.no_grad():
            model.weight += torch.randn(5, 3)
        ours.update_parameters(model, torch.tensor(has_stepped))
        if has_stepped:
            theirs.update_parameters(model, torch.tensor(1.0))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-4)
    assert ours.n_averaged == 3


def test_evaluations_detectors_and_slim_files_use_the_average(run, tmp_path, shapes):
    average = torch.load(run / "model_final.pth", weights_only=True)["model"]
    cfg = small_config("retinanet", *RUN, *EMA, "OUTPUT_DIR", str(tmp_path))
    model = load_detector(cfg, run / "model_final.pth")[0]
    assert all(torch.equal(value, average[name]) for name, value in model.state_dict().items())
    Trainer.test(cfg, model)
    losses = [json.loads((f / "evaluation.json").read_text())["shapes_val"]["validation_loss"] for f in (run, tmp_path)]
    # The run may have had another number of threads.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0]["total_loss"] > 0
    slim_checkpoint(run / "model_final.pth", tmp_path / "slim.pth")
    slim = torch.load(tmp_path / "slim.pth", weights_only=True)
    assert "unaveraged_model" not in slim and slim["model"].keys() == average.keys()
    assert all(torch.equal(slim["model"][name], average[name]) for name in average)


def resumed(folder, contents, *overrides):
    """Resume from a checkpoint of the third iteration."""
    torch.save(contents, folder / "model_0000002.pth")
    trainer = Trainer(small_config("retinanet", *EMA, "OUTPUT_DIR", str(folder), *overrides))
    trainer.resume_or_load(resume=True)
    return trainer


@pytest.mark.parametrize("enabled", [True, False])
def test_a_resumed_run_trains_the_unaveraged_weights(run, shapes, tmp_path, enabled):
    contents = torch.load(run / "model_0000002.pth", weights_only=True)
    trainer = resumed(tmp_path, contents, "MODEL.EMA.ENABLED", str(enabled))
    weights = trainer.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in contents["unaveraged_model"].items())
    if enabled:
        average = trainer.averaged.module.state_dict()
        assert all(torch.equal(value, average[name]) for name, value in contents["model"].items())
        assert trainer.averaged.n_averaged == 3
        contents["model"]["head.cls_score.bias"][0] = float("nan")
        assert "head.cls_score.bias" in message(resumed, tmp_path, contents)
        # Without averaged weights in the checkpoint, averaging starts.
        weights = contents.pop("unaveraged_model")
        trainer = resumed(tmp_path, contents | {"model": weights})
        average = trainer.averaged.module.state_dict()
        assert trainer.averaged.n_averaged == 0 and all(torch.equal(average[name], weights[name]) for name in weights)
