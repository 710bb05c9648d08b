"""An export says what it is at, and cleans up where it is told to end."""

import logging
import signal
import time

import pytest
import torch

from projects_vil.export.formats import write_model
from projects_vil.export.stages import Stages
from tests.projects_vil.export.exporting import detector
from tests.projects_vil.helpers import CONFIGS, PATIENCE, SMALL, start_tool

LOGGER = "projects_vil.export.stages"


def test_a_stage_is_said_as_it_begins_and_as_it_ends(caplog):
    stages = Stages()
    with caplog.at_level(logging.INFO, LOGGER):
        with stages("recording"):
            assert caplog.messages == ["recording ..."] and stages.seconds == {}
            time.sleep(0.11)
        with pytest.raises(KeyError), stages("compiling", "for minutes"):
            raise KeyError
    assert list(stages.seconds) == ["recording"] and 0.1 <= stages.seconds["recording"] < 60
    assert caplog.messages[1:] == [f"recording: {stages.seconds['recording']:.1f} s", "compiling: for minutes ..."]


def test_aot_inductor_says_beforehand_that_it_takes_minutes(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("projects_vil.export.formats.pytorch.aot_inductor.record", lambda exportable, example: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, **options: None)
    with caplog.at_level(logging.INFO, LOGGER):
        write_model(detector("retinanet"), torch.zeros(3, 64, 64), tmp_path / "model.aoti.pt2", "aot_inductor")
    begun = [text for text in caplog.messages if text.endswith(" ...")]
    assert begun[0] == "recording ..." and begun[1].startswith("compiling: AOTInductor calls /")
    assert begun[1].endswith("sh for minutes ...") and len(begun) == 2


def test_the_stages_of_an_export_are_in_its_report(exported):
    assert list(exported("retinanet")[1]["seconds"]) == ["recording", "writing", "loading", "comparing"]


def test_an_export_that_is_told_to_end_leaves_nothing(weights, tmp_path):
    output = tmp_path / "export"
    arguments = ["--config-file", CONFIGS["retinanet"], "--weights", weights(), "--output", output]
    # Tracing could be over before the signal is there.
    arguments += ["--format", "torch_export"]
    process = start_tool("export_model.py", *arguments, "--opts", *SMALL["retinanet"], folder=tmp_path)
    deadline = time.monotonic() + PATIENCE
    while not list(output.glob(".unfinished-*")):
        assert process.is_alive() and time.monotonic() < deadline, (tmp_path / "stderr").read_text()
        time.sleep(0.02)
    process.terminate()
    process.join(PATIENCE)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not output.exists()
