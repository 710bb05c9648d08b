"""What a training run logs, once each, and the warnings of others."""

import logging
import subprocess
import sys
import warnings

import pytest
from detectron2.utils import logger as detectron2_logger

from backbones import ConfigError
from projects_vil.utils import log_run, silence_known_warnings


def log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, text)


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
    log("detectron2", logging.ERROR, "Serializing failed")
    try:
        raise ConfigError("no image 7.jpg")
    except ConfigError:
        logging.getLogger("detectron2.engine.train_loop").exception("Exception during training:")
    assert err == "" and [out.count(text) for text in seen.values()] == [1, 1, 1]
    assert not any(text in out for text in unseen.values())
    later = capsys.readouterr().out
    assert "Serializing failed" in later and "Traceback" not in later
    written = (tmp_path / "log.txt").read_text()
    assert [written.count(text) for text in (seen | unseen).values()] == [1] * 6


def test_another_process_writes_a_file_of_its_own_and_shows_nothing(loggers, tmp_path, capsys):
    log_run(str(tmp_path), rank=1)
    log("projects_vil.engine", logging.INFO, "of the second process")
    assert capsys.readouterr() == ("", "")
    assert "of the second process" in (tmp_path / "log.txt.rank1").read_text()


# -- other people's warnings -----------------------------------------------------------------------


def test_known_warnings_and_records_are_left_out_by_their_text(caplog):
    known = (
        ("`torch.jit.script` is deprecated. Please", FutureWarning),
        ("torch.meshgrid: in an upcoming release", UserWarning),
    )
    others = ("`torch.jit.trace` is deprecated", FutureWarning), ("This DataLoader will create 8", UserWarning)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_known_warnings()
        for text, category in (*known, *others):
            warnings.warn(text, category, stacklevel=1)
    assert [str(warning.message) for warning in shown] == [text for text, _ in others]
    log("torch.utils.cpp_extension", logging.WARNING, "No CUDA runtime is found, using CUDA_HOME='/usr/local'")
    log("detectron2.config.compat", logging.WARNING, "Config 'a' has no VERSION. Assuming it to be compatible with v2.")
    assert caplog.messages == []
    log("torch.utils.cpp_extension", logging.WARNING, "the compiler is too old")
    assert caplog.messages == ["the compiler is too old"]


@pytest.mark.slow
def test_a_start_is_silent():
    """In a process of its own: each tool's first line, with all that it imports."""
    code = "import projects_vil.engine, projects_vil.inference, projects_vil.analysis"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
