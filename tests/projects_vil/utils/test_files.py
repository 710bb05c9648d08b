"""One run in a folder at a time, and folders that are written completely or not at all."""

import multiprocessing
import os
import signal
import time

import pytest

from backbones import ConfigError
from projects_vil.utils import check_output_folder, check_unlocked, files, run_lock, unfinished_folder


def hold(folder, locked):
    with run_lock(folder):
        # As a worker that loads data: it outlives a parent that is killed.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
        locked.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("fork")
    locked = context.Event()
    process = context.Process(target=hold, args=(tmp_path, locked))
    process.start()
    assert locked.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(files, "SECONDS_TO_DIE", 0.0)
    for attempt in (lambda: run_lock(tmp_path).__enter__(), lambda: check_unlocked(tmp_path)):
        for _ in range(2):
            with pytest.raises(ConfigError) as caught:
                attempt()
            assert all(text in str(caught.value) for text in ("OUTPUT_DIR", str(tmp_path), str(holder.pid)))
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    monkeypatch.undo()
    check_unlocked(tmp_path)
    with run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_folders_without_a_run(tmp_path):
    check_unlocked(tmp_path / "absent")
    check_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="train.output_dir"), run_lock(tmp_path / "file", key="train.output_dir"):
        pass


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_fails_leaves_a_folder_as_it_was(tmp_path, is_new, error):
    folder = tmp_path / "export"
    if not is_new:
        folder.mkdir()
        (folder / "model.ts").write_text("old")
    with pytest.raises(error), unfinished_folder(folder) as unfinished:
        (unfinished / "model.ts").write_text("new")
        raise error
    assert folder.exists() != is_new
    assert is_new or [path.read_text() for path in folder.iterdir()] == ["old"]
    with unfinished_folder(folder) as unfinished:
        (unfinished / "model.ts").write_text("new")
        (unfinished / "model.ts").replace(folder / "model.ts")
    assert [path.read_text() for path in folder.iterdir()] == ["new"]


def test_an_output_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    check_output_folder(tmp_path)
    check_output_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        check_output_folder(tmp_path / "file")
    with pytest.raises(OSError), unfinished_folder(tmp_path / "file"):
        pass
