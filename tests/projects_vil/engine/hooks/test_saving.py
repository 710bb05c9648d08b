"""When metrics are written, and which signals are heard meanwhile."""

import os
import signal
import types

import pytest
from detectron2.utils.events import EventStorage, EventWriter

from projects_vil.engine.hooks import SaveCheckpoints, WriteMetrics


class _Written(EventWriter):
    def __init__(self, storage):
        self.storage, self.found = storage, []

    def write(self) -> None:
        self.found.append((self.storage.iter, dict(self.storage.latest()).get("bbox/AP", (None,))[0]))


def test_every_evaluation_is_written():
    with EventStorage() as storage:
        writer = _Written(storage)
        hook = WriteMetrics([writer], evaluation_period=3)
        for iteration in range(22):
            storage.iter = iteration
            if (iteration + 1) % 3 == 0:
                storage.put_scalar("bbox/AP", iteration, smoothing_hint=False)
            hook.trainer = types.SimpleNamespace(iter=iteration, max_iter=22)
            hook.after_step()
    assert [iteration for iteration, _ in writer.found] == [2, 5, 8, 11, 14, 17, 19, 20, 21]
    assert all(value == iteration for iteration, value in writer.found if (iteration + 1) % 3 == 0)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_signal_that_is_ignored_stays_so(ignored):
    """Under nohup SIGHUP is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        hook = SaveCheckpoints(types.SimpleNamespace(save_dir=os.devnull), period=1)
        hook.before_train()
        assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) is ignored
        hook.after_train()
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
