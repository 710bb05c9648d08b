"""The line of progress."""

import logging
import re

from detectron2.utils.events import EventStorage

from projects_vil.progress import ProgressPrinter


def line_of(storage: EventStorage, caplog) -> str:
    with caplog.at_level(logging.INFO, logger="detectron2.utils.events"):
        ProgressPrinter(100, batch_size=8).write()
    (record,) = caplog.records
    return record.getMessage()


def test_one_line_has_time_left_speed_wait_and_memory(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("detectron2"), "propagate", True)
    with EventStorage(0) as storage:
        for iteration in range(40):
            # What is older than 20 iterations does not count.
            storage.iter = iteration
            storage.put_scalars(total_loss=3.0, lr=1e-4, time=2.0 if iteration >= 20 else 9.0, data_time=0.5)
        line = line_of(storage, caplog)
    assert "\n" not in line
    for part in ("iter: 39  ", "total_loss: 3  ", "lr: 0.0001  ", "images/s: 4  ", "data_time: 0.5000 (25% waiting)"):
        assert part in line, part
    assert re.search(r"eta: 0:0\d:\d\d  ", line)
    assert int(re.search(r"max_rss: (\d+)M", line)[1]) > 50


def test_the_first_line_of_a_run_has_no_times_yet(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("detectron2"), "propagate", True)
    with EventStorage(0) as storage:
        storage.put_scalars(total_loss=3.0)
        line = line_of(storage, caplog)
    assert "iter: 0  total_loss: 3" in line and "images/s" not in line and "eta" not in line


def test_the_loss_of_an_evaluation_is_the_latest(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("detectron2"), "propagate", True)
    with EventStorage(0) as storage:
        for iteration, (training, validation) in enumerate([(2.0, 1.0), (4.0, 5.0)]):
            storage.iter = iteration
            storage.put_scalar("total_loss", training)
            storage.put_scalar("validation_loss/total_loss", validation, smoothing_hint=False)
        line = line_of(storage, caplog)
    assert " total_loss: 3  validation_loss/total_loss: 5  " in line


def test_an_iteration_is_told_once(caplog, monkeypatch):
    """After its evaluation, and not again at the end of the run; the first one has no times to guess from."""
    monkeypatch.setattr(logging.getLogger("detectron2"), "propagate", True)
    printer = ProgressPrinter(100, batch_size=8)
    with EventStorage(0) as storage, caplog.at_level(logging.INFO, logger="detectron2.utils.events"):
        for iteration in (0, 0, 1, 1):
            storage.iter = iteration
            storage.put_scalar("total_loss", 3.0)
            printer.write()
    assert [re.search(r"iter: (\d+)", record.getMessage())[1] for record in caplog.records] == ["0", "1"]
