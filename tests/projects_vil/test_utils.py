"""Logs, locks, signals, memory and child processes."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from detectron2.utils import logger as detectron2_logger

from backbones import ConfigError, errors
from projects_vil import utils

# -- logs ------------------------------------------------------------------------------------------


def log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, text)


@pytest.fixture
def loggers():
    """Loggers without handlers, as in a new process."""
    for name in ("detectron2", "fvcore", "projects_vil", "backbones"):
        logging.getLogger(name).handlers = []


def test_where_a_run_logs(loggers, tmp_path, capsys):
    """The console does not show some records of detectron2, and tracebacks of mistakes of the user."""
    utils.log_run(str(tmp_path), rank=1)
    log("projects_vil.engine", logging.INFO, "of the second process")
    assert capsys.readouterr() == ("", "") and "second process" in (tmp_path / "log.txt.rank1").read_text()
    utils.log_run(str(tmp_path))
    # default_setup makes the same call later.
    detectron2_logger.setup_logger(str(tmp_path), distributed_rank=0, name="fvcore")
    texts = [f"of {name}" for name in ("projects_vil.evaluation", "fvcore.common", "detectron2.data")]
    for text in texts:
        log(text.removeprefix("of "), logging.INFO, text)
    out, err = capsys.readouterr()
    assert err == "" and all(out.count(text) == (tmp_path / "log.txt").read_text().count(text) == 1 for text in texts)
    log("detectron2.utils.events", logging.INFO, " iter: 19  gradient_norm: 7.5")
    try:
        raise ConfigError("no image 7.jpg")
    except ConfigError:
        logging.getLogger("detectron2.engine.train_loop").exception("Exception during training:")
    assert capsys.readouterr().out == "" and "no image 7.jpg" in (tmp_path / "log.txt").read_text()
    utils.log_run(str(tmp_path / "second"))
    log("projects_vil.engine", logging.INFO, "of the second run")
    assert capsys.readouterr().out.count("second run") == 1 and "second run" not in (tmp_path / "log.txt").read_text()


# -- locks -----------------------------------------------------------------------------------------


def hold(folder, locked):
    with utils.run_lock(folder):
        # This process survives when its parent is killed, like a data loader worker.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
        locked.set()
        time.sleep(600)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    locked = context.Event()
    holder = context.Process(target=hold, args=(tmp_path, locked))
    holder.start()
    assert locked.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(utils, "LOCK_TIMEOUT", 0.0)
        with pytest.raises(ConfigError, match=f"{tmp_path}' .* {holder.pid} "), utils.run_lock(tmp_path):
            pass
    holder.kill()
    holder.join()
    with utils.run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()
    assert list(tmp_path.iterdir()) == []


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """Set handlers for all stop signals, even if they are ignored, as under nohup or in a background job."""
    for number in errors.STOP_SIGNALS:
        signal.signal(number, errors.terminate)


@pytest.mark.parametrize("number", errors.STOP_SIGNALS)
def test_a_deferred_signal_takes_effect_at_the_end(handlers, number):
    done = []
    with pytest.raises(SystemExit) as caught:
        with utils.deferred_signals():
            os.kill(os.getpid(), number)
            done.append("the rest")
        done.append("more")
    assert done == ["the rest"] and caught.value.code == 128 + number and signal.getsignal(number) is errors.terminate


def test_a_signal_ends_the_process_between_two_calls_of_a_model(handlers, monkeypatch):
    module, calls, hook = torch.nn.Identity(), [], sys.unraisablehook
    # The program that reads the output has ended.
    monkeypatch.setattr(os, "write", mock.Mock(side_effect=BrokenPipeError))
    options = {"single_process": True, "notice": "The run stops."}
    with pytest.raises(SystemExit) as caught:
        with utils.stop_requests(**options) as received, utils.terminating_between_calls(module, received):
            for number in range(3):
                calls.append(module(number))
                os.kill(os.getpid(), signal.SIGTERM)
                calls.append("in between")
    assert calls == [0, "in between"] and caught.value.code == 143 and module(3) == 3 and sys.unraisablehook is hook


@pytest.mark.parametrize("single_process, error", [(True, KeyboardInterrupt), (False, SystemExit)])
def test_a_second_ctrl_c_interrupts_a_single_process_at_once(handlers, single_process, error):
    with pytest.raises(error), utils.stop_requests(single_process=single_process) as received:
        with utils.terminating_between_calls(torch.nn.Identity(), received):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)


# -- memory and imports ----------------------------------------------------------------------------


@pytest.mark.slow
def test_imports_are_silent_and_need_no_modules_of_unix():
    code = (
        "import signal, sys; del signal.SIGHUP, signal.SIGKILL, signal.pthread_sigmask\n"
        "import projects_vil.utils, detectron2.engine\n"
        "sys.modules.update(dict.fromkeys(('fcntl', 'resource', 'termios', 'pwd', 'grp')))\n"
        "import projects_vil.engine, projects_vil.export, projects_vil.analysis\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
