"""What is written between iterations: checkpoints and metrics."""

import contextlib
import logging
import signal
from collections.abc import Iterator, Sequence

from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils import comm
from detectron2.utils.events import EventWriter
from torch import nn

from projects_vil.checkpoint import Checkpointer, remove_old, remove_partial
from projects_vil.engine.resuming import loss_normalizers
from projects_vil.engine.steps import unwrapped
from projects_vil.utils import ToldToEnd, handling_signals, told_between_calls


class SaveCheckpoints(HookBase):
    """Save every ``period`` iterations, at the end, and when a signal asks the run to stop. All processes have it.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP save after the iteration that is under way, and end the process with 128 and the
    signal's number, as shells have it; a second Ctrl-C ends it at once.

    Args:
        checkpointer: writes in the main process.
        period: iterations between two checkpoints.
        keep: how many numbered ones are kept; 0 for all.
    """

    def __init__(self, checkpointer: Checkpointer, *, period: int, keep: int = 0) -> None:
        self.checkpointer = checkpointer
        self.period = period
        self.keep = keep
        self.received = 0
        self._saved: int | None = None
        self._handling = contextlib.ExitStack()

    def before_train(self) -> None:
        if comm.is_main_process():
            remove_partial(self.checkpointer.save_dir)
        # One that is ignored, as under nohup, stays so.
        self._handling.enter_context(handling_signals(self._receive))

    def after_train(self) -> None:
        self._handling.close()

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        # Where the processes hear of a signal in different iterations, all stop after the same one.
        stop = max(comm.all_gather(self.received))
        if done % self.period == 0 or (stop and done < self.trainer.max_iter):
            self.save(f"model_{self.trainer.iter:07d}")
        if done >= self.trainer.max_iter:
            self.save("model_final")
        elif stop:
            logging.getLogger(__name__).warning(
                "%s: saved after iteration %d; go on with --resume", signal.Signals(stop).name, self.trainer.iter
            )
            raise SystemExit(128 + stop)

    def save(self, name: str, *, finished: bool = False) -> None:
        """Save, in all processes, since each has a loss normaliser of its own.

        Args:
            finished: whether evaluation and writers are through with the iteration.
        """
        self._save(name, loss_normalizers(unwrapped(self.trainer.model)), finished=finished)

    @contextlib.contextmanager
    def ended_at_once(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, as an evaluation does, which may be long, a signal ends the run without waiting for the
        next iteration; saved first, where the last checkpoint is older. All processes enter this together.

        Args:
            model: the one that is evaluated, between two calls of which the run ends.
        """
        # Those of all: once they are told to end, they are not together any more.
        normalizers = loss_normalizers(unwrapped(self.trainer.model))
        alone = comm.get_world_size() == 1
        try:
            if self.received:
                raise ToldToEnd(self.received)
            with told_between_calls(model, alone=alone):
                yield
        except ToldToEnd as told:
            said = "ended during the evaluation"
            if self.trainer.iter < self.trainer.max_iter and self._saved != self.trainer.iter:
                self._save(f"model_{self.trainer.iter:07d}", normalizers)
                said = f"saved after iteration {self.trainer.iter}, {said}"
            logging.getLogger(__name__).warning("%s: %s; go on with --resume", told.name, said)
            raise SystemExit(told.status) from None

    def _save(self, name: str, normalizers: list[float | None], *, finished: bool = False) -> None:
        self.checkpointer.save(
            name,
            iteration=self.trainer.iter,
            seed=self.trainer.seed,
            loss_normalizers=normalizers,
            finished=finished,
        )
        self._saved = self.trainer.iter
        if self.keep and comm.is_main_process():
            remove_old(self.checkpointer.save_dir, keep=self.keep)

    def _receive(self, number: int, frame: object) -> None:
        # Of several processes each may get one Ctrl-C twice: from the terminal, and from what has started them.
        if self.received == number == signal.SIGINT and comm.get_world_size() == 1:
            raise KeyboardInterrupt
        self.received = self.received or number


class SaveEvaluated(HookBase):
    """After an evaluation, write what it found into the checkpoint of the same iteration too.

    A checkpoint is written before the evaluation, which may fail; a run that is resumed from that one evaluates first.

    Args:
        saving: the hook that wrote before.
        period: of evaluations.
    """

    def __init__(self, saving: SaveCheckpoints, *, period: int) -> None:
        self.saving = saving
        self.period = period

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if self.period and done % self.period == 0 and done % self.saving.period == 0 and done < self.trainer.max_iter:
            self.saving.save(f"model_{self.trainer.iter:07d}", finished=True)


class WriteMetrics(PeriodicWriter):
    """detectron2's, which writes after each evaluation too: of several between two lines only the last would be kept.

    Args:
        writers: of the run.
        evaluation_period: iterations between two evaluations, or 0.
    """

    def __init__(self, writers: Sequence[EventWriter], *, evaluation_period: int) -> None:
        super().__init__(writers)
        self.evaluation_period = evaluation_period

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if self.evaluation_period and done % self.evaluation_period == 0:
            for writer in self._writers:
                writer.write()
        else:
            super().after_step()
