"""What is done between iterations."""

import contextlib
import logging
import math
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from detectron2.engine import HookBase, hooks
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils import comm
from detectron2.utils.events import EventWriter
from torch import nn

from backbones import InputError
from backbones.attention.alternatives.performer import PerformerAttention, redraw_features
from backbones.attention.sliding_chunk import draw_shifts
from projects_vil.checkpoint import Checkpointer, remove_old, remove_partial
from projects_vil.engine.resuming import loss_normalizers
from projects_vil.engine.steps import unwrapped
from projects_vil.solver import shown_group
from projects_vil.utils import ToldToEnd, handling_signals, told_between_calls


class RedrawFeatures(HookBase):
    """Draw Performer's random features anew every ``period`` iterations (ViL appendix D).

    The iteration is the seed: all processes draw the same, and a resumed run draws as one that was never stopped.
    The features themselves are in the checkpoint.
    """

    def __init__(self, period: int) -> None:
        if period < 1:
            raise InputError(f"MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD is {period}: it is 1 or more iterations")
        self.period = period

    def before_train(self) -> None:
        """Start with the features of the first process: detectron2 does not share buffers."""
        if comm.get_world_size() > 1:
            for module in self.trainer.model.modules():
                if isinstance(module, PerformerAttention):
                    torch.distributed.broadcast(module.features, src=0)

    def before_step(self) -> None:
        if self.trainer.iter and self.trainer.iter % self.period == 0:
            redraw_features(self.trainer.model, seed=self.trainer.iter)


class LRScheduler(hooks.LRScheduler):
    """detectron2's, by whose name checkpoints know it; ``lr`` is that of :func:`~projects_vil.solver.shown_group`.

    detectron2 says that of the largest group, which layer-wise decay may have made a layer's.
    """

    def before_train(self) -> None:
        super().before_train()
        self._best_param_group_id = shown_group(self._optimizer)


class RandomShift(HookBase):
    """Until a share of the run, let local attention of ViL see one neighbouring chunk, drawn anew for each layer.

    The iteration is the seed: all processes draw the same, and a resumed run draws as one that was never stopped.

    Args:
        model: whose attention it is.
        until: the share of all iterations, 0 to 1; 0.875 in the official code's recipes.

    Raises:
        InputError: where the model has no such attention.
    """

    def __init__(self, model: nn.Module, until: float) -> None:
        if not draw_shifts(model, seed=None):
            raise InputError(
                f"MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL is {until}, and no stage has sliding_chunk attention: it is 0 "
                "there"
            )
        self.model = model
        self.until = until

    def before_step(self) -> None:
        is_on = self.trainer.iter < self.until * self.trainer.max_iter
        draw_shifts(self.model, seed=self.trainer.iter if is_on else None)


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


class KeepBest(HookBase):
    """Keep the checkpoint with the best value of a metric as ``model_best.pth``; the best value survives a resume.

    Args:
        checkpointer: writes in the main process.
        metric: as in ``metrics.json``, ``"bbox/AP"`` for one.
        least: whether less is better, as of a loss.

    Attributes:
        best, best_iteration: the value, and where it was; None before the first.
        waited: evaluations since.
    """

    def __init__(self, checkpointer: Checkpointer, *, metric: str, least: bool = False) -> None:
        self.checkpointer = checkpointer
        self.metric = metric
        self.sign = -1 if least else 1
        self.best: float | None = None
        self.best_iteration: int | None = None
        self.waited = 0
        self._compared: int | None = None

    def after_step(self) -> None:
        self._compare()

    def after_train(self) -> None:
        self._compare()
        # What evaluations give is not smoothed; where none has come to its end there is nothing to say.
        hints = self.trainer.storage.smoothing_hints()
        known = ", ".join(name for name, is_smoothed in hints.items() if "/" in name and not is_smoothed)
        if self.best is None and known:
            logging.getLogger(__name__).warning(
                "TEST.BEST_METRIC is %s, and no evaluation gave it (%s): there is no model_best.pth", self.metric, known
            )

    def state_dict(self) -> dict[str, Any]:
        names = ("metric", "best", "best_iteration", "waited")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["metric"] == self.metric:
            self.best, self.best_iteration = state_dict["best"], state_dict["best_iteration"]
            # Older checkpoints have none.
            self.waited = state_dict.get("waited", 0)

    def _compare(self) -> None:
        value, iteration = self.trainer.storage.latest().get(self.metric, (None, None))
        if value is None or iteration != self.trainer.iter or iteration == self._compared:
            return
        self._compared = iteration
        is_first = self.best is None
        if not math.isfinite(value) or not is_first and self.sign * value <= self.sign * self.best:
            self.waited += 1
            return
        self.best, self.best_iteration, self.waited = value, iteration, 0
        logging.getLogger(__name__).info("the best %s so far: %.3f", self.metric, value)
        self.checkpointer.save("model_best", tag=False, iteration=iteration, metric={self.metric: value})


class StoppedEarly(BaseException):
    """Ends the loop of a run that is done, from within a hook: no error."""


class StopEarly(HookBase):
    """End the run where several evaluations in a row were no better than the best; the number survives a resume.

    The last checkpoint is saved as ``model_final.pth`` then. All processes have it.

    Args:
        best: counts the evaluations.
        saving: writes the checkpoint.
        patience: how many evaluations.
        period: iterations between two evaluations.
    """

    def __init__(self, best: KeepBest, saving: SaveCheckpoints, *, patience: int, period: int) -> None:
        self.best = best
        self.saving = saving
        self.patience = patience
        self.period = period

    def before_train(self) -> None:
        """A run that has ended so does not go on when it is resumed."""
        if 0 < self.trainer.start_iter < self.trainer.max_iter and self._has_waited():
            self.trainer.iter = self.trainer.start_iter - 1
            self._stop()

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self.period == 0 and done < self.trainer.max_iter and self._has_waited():
            self._stop()

    def _has_waited(self) -> bool:
        # The main process alone knows what evaluations gave.
        return comm.all_gather(self.best.waited)[0] >= self.patience

    def _stop(self) -> None:
        self.saving.save("model_final", finished=True)
        best = "none had one" if self.best.best is None else f"{self.best.best:.3f} after {self.best.best_iteration}"
        logging.getLogger(__name__).info(
            "stopped early after iteration %d: %d evaluations without a better %s (%s); a larger "
            "SOLVER.EARLY_STOPPING_PATIENCE and --resume go on",
            self.trainer.iter,
            self.best.waited,
            self.best.metric,
            best,
        )
        raise StoppedEarly
