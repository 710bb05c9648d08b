"""One run in a folder at a time: across processes, across hosts, and after what was killed."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from backbones import InputError
from projects_vil.utils import check_unlocked, locking, run_lock


def hold(folder, held):
    with run_lock(folder):
        held.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    process = context.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(locking, "SECONDS_TO_DIE", 0.0)
    message = f"OUTPUT_DIR {tmp_path} is in use by process {holder.pid} on {socket.gethostname()}: wait until that"
    for attempt in (lambda: run_lock(tmp_path).__enter__(), lambda: check_unlocked(tmp_path)):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(caught.value).startswith(message)
    # The one that was refused has not taken the lock away.
    assert (tmp_path / ".run.lock").read_text() == f"{socket.gethostname()} {holder.pid}\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    check_unlocked(tmp_path)
    with run_lock(tmp_path):
        assert (tmp_path / ".run.lock").read_text() == f"{socket.gethostname()} {os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_nothing(tmp_path):
    check_unlocked(tmp_path / "not_there")
    check_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def of_another_host(folder, age):
    path = folder / ".run.lock"
    path.write_text("elsewhere 17\n")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize("age", [100.0, 0.0])
def test_a_run_of_another_host_that_gives_no_sign_of_life_is_no_more(tmp_path, age):
    of_another_host(tmp_path, age)
    with run_lock(tmp_path, patience=0.5):
        assert "elsewhere" not in (tmp_path / ".run.lock").read_text()


def test_a_run_of_another_host_that_lives_is_named(tmp_path):
    path = of_another_host(tmp_path, 0.0)
    beat = threading.Timer(0.2, lambda: os.utime(path))
    beat.start()
    with pytest.raises(InputError, match="is in use by process 17 on elsewhere"), run_lock(tmp_path, patience=5.0):
        pass
    beat.join()


def test_a_run_gives_signs_of_life(tmp_path):
    with run_lock(tmp_path, heartbeat=0.05):
        before = (tmp_path / ".run.lock").stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while (tmp_path / ".run.lock").stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    with pytest.raises(InputError, match="cannot write into OUTPUT_DIR"), run_lock(tmp_path / "not_there"):
        pass
