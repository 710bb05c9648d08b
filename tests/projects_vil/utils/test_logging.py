"""What is logged is seen where it should be, once."""

import logging
import subprocess
import sys
import warnings

import pytest
from detectron2.utils import logger as detectron2_logger

from projects_vil.utils import log_run, log_to_stderr, run_tool
from projects_vil.utils.logging import concerns_a_user
from projects_vil.utils.warnings import silence_known_warnings


def log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, text)


def test_a_tool_shows_what_this_project_says_and_others_warnings(capsys):
    def main():
        for name in ("projects_vil.config.device", "backbones.utils.files", "fvcore.common"):
            log(name, logging.DEBUG, f"{name}, in detail")
            log(name, logging.INFO, f"{name} says")
            log(name, logging.WARNING, f"{name} warns")

    run_tool(main)
    assert capsys.readouterr() == (
        "",
        "projects_vil.config.device says\nwarning: projects_vil.config.device warns\n"
        "backbones.utils.files says\nwarning: backbones.utils.files warns\nwarning: fvcore.common warns\n",
    )
    log("projects_vil.config.device", logging.INFO, "after the tool")
    assert capsys.readouterr().err == ""


def test_a_tool_may_log_by_itself(capsys):
    run_tool(lambda: log("projects_vil.utils", logging.WARNING, "seen by whoever listens"), log=False)
    assert capsys.readouterr() == ("", "")


def test_others_talk_is_left_out_at_any_level(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    run_tool(lambda: log("somebody", logging.INFO, "talks"))
    assert capsys.readouterr().err == ""


def test_nothing_stays_after_a_mistake():
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(ZeroDivisionError), log_to_stderr():
        raise ZeroDivisionError
    assert logging.getLogger().handlers == handlers


@pytest.fixture
def loggers():
    """Those that a run sets up, as they were afterwards."""
    found = [logging.getLogger(name) for name in ("detectron2", "fvcore", "projects_vil", "backbones")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in found]
    for logger in found:
        logger.handlers = []
    detectron2_logger.setup_logger.cache_clear()
    yield
    for logger, (handlers, propagate, level) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    detectron2_logger.setup_logger.cache_clear()


def test_a_run_writes_all_into_its_file_and_shows_what_concerns_its_user(loggers, tmp_path, capsys):
    log_run(str(tmp_path))
    # As default_setup does afterwards.
    detectron2_logger.setup_logger(str(tmp_path), distributed_rank=0, name="fvcore")
    detectron2_logger.setup_logger(str(tmp_path), distributed_rank=0)
    seen = {
        "projects_vil.evaluation.results": "results written to evaluation.json",
        "detectron2.engine.train_loop": "Starting training from iteration 0",
        "fvcore.common.checkpoint": "Saving checkpoint to model_final.pth",
    }
    unseen = {
        "detectron2.data.common": "Serializing 16 elements to byte tensors and concatenating them all ...",
        "detectron2": "Environment info:\n---",
        "detectron2.engine.defaults": "Model:\nRetinaNet(",
    }
    for name, text in (seen | unseen).items():
        log(name, logging.INFO, text)
    out, err = capsys.readouterr()
    assert err == "" and [out.count(text) for text in seen.values()] == [1, 1, 1]
    assert not any(text in out for text in unseen.values())
    written = (tmp_path / "log.txt").read_text()
    assert [written.count(text) for text in (seen | unseen).values()] == [1] * 6


def test_another_process_writes_a_file_of_its_own_and_shows_nothing(loggers, tmp_path, capsys):
    log_run(str(tmp_path), rank=1)
    log("projects_vil.engine", logging.INFO, "of the second process")
    assert capsys.readouterr() == ("", "")
    assert "of the second process" in (tmp_path / "log.txt.rank1").read_text()


def test_errors_are_always_shown():
    record = logging.LogRecord("detectron2", logging.ERROR, "", 0, "Serializing failed", (), None)
    assert concerns_a_user(record)


# -- other people's warnings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, category, is_shown",
    [
        ("`torch.jit.script` is deprecated. Please switch to `torch.compile` or `torch.export`.", FutureWarning, False),
        ("torch.meshgrid: in an upcoming release, it will be required to pass", UserWarning, False),
        ("pkg_resources is deprecated as an API. See", UserWarning, False),
        ("`torch.jit.trace` is deprecated", FutureWarning, True),
        ("This DataLoader will create 8 worker processes in total", UserWarning, True),
    ],
)
def test_known_warnings_are_left_out_by_their_text(text, category, is_shown):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_known_warnings()
        warnings.warn(text, category, stacklevel=1)
    assert len(shown) == is_shown


@pytest.mark.parametrize(
    "name, text, is_shown",
    [
        ("torch.utils.cpp_extension", "No CUDA runtime is found, using CUDA_HOME='/usr/local'", False),
        ("torch.utils.cpp_extension", "the compiler is too old", True),
        (
            "fvcore.common.config",
            "Loading config /site/detectron2/model_zoo/configs/a.yaml with yaml.unsafe_load. Your machine may be",
            False,
        ),
        ("fvcore.common.config", "Loading config mine.yaml with yaml.unsafe_load. Your machine may be at risk", True),
        ("detectron2.config.compat", "Config 'a.yaml' has no VERSION. Assuming it to be compatible with v2.", False),
    ],
)
def test_known_records_are_left_out_by_their_text(caplog, name, text, is_shown):
    silence_known_warnings()
    log(name, logging.WARNING, text)
    assert len(caplog.records) == is_shown


def test_operators_that_are_not_built_are_not_needed(caplog):
    log("detectron2", logging.WARNING, "a 1\ndetectron2._C    not built correctly: No module named '_C'\nb 2")
    assert caplog.messages == ["a 1\ndetectron2._C    not built, and not needed\nb 2"]


@pytest.mark.slow
def test_a_start_is_silent():
    """In a process of its own: each tool's first line, with all that it imports."""
    code = "import projects_vil.engine, projects_vil.inference, projects_vil.analysis"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
