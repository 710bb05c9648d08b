"""What is done between iterations."""

import logging
import math
import signal
import threading
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from backbones import InputError
from backbones.attention.performer import PerformerAttention, redraw_features
from projects_vil.checkpoint import Checkpointer, remove_old, remove_partial
from projects_vil.engine.resuming import loss_normalizers
from projects_vil.engine.steps import unwrapped
from projects_vil.evaluation import LOSS_TASK


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


class SaveCheckpoints(HookBase):
    """Save every ``period`` iterations, at the end, and when a signal asks the run to stop. All processes have it.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP save after the iteration that is under way, and end the process with 128 and the
    signal's number, as shells have it; a second Ctrl-C ends it at once.

    Args:
        checkpointer: writes in the main process.
        period: iterations between two checkpoints.
        keep: how many numbered ones are kept; 0 for all.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, checkpointer: Checkpointer, *, period: int, keep: int = 0) -> None:
        self.checkpointer = checkpointer
        self.period = period
        self.keep = keep
        self._received = 0
        self._before: dict[int, object] = {}

    def before_train(self) -> None:
        if comm.is_main_process():
            remove_partial(self.checkpointer.save_dir)
        if threading.current_thread() is threading.main_thread():
            # One that is ignored, as under nohup, stays so.
            numbers = [number for number in self.SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._receive) for number in numbers}

    def after_train(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        # Where the processes hear of a signal in different iterations, all stop after the same one.
        stop = max(comm.all_gather(self._received))
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
        normalizers = loss_normalizers(unwrapped(self.trainer.model))
        self.checkpointer.save(
            name,
            iteration=self.trainer.iter,
            seed=self.trainer.seed,
            loss_normalizers=normalizers,
            finished=finished,
        )
        if self.keep and comm.is_main_process():
            remove_old(self.checkpointer.save_dir, keep=self.keep)

    def _receive(self, number: int, frame: object) -> None:
        if self._received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number


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


class KeepBest(HookBase):
    """Keep the checkpoint with the best value of a metric as ``model_best.pth``; the best value survives a resume.

    Args:
        checkpointer: writes in the main process.
        metric: as in ``metrics.json``, ``"bbox/AP"`` for one; more is better, and less of a ``"validation_loss/..."``.

    Attributes:
        best, best_iteration: the value, and where it was; None before the first.
        waited: evaluations since.
    """

    def __init__(self, checkpointer: Checkpointer, *, metric: str) -> None:
        self.checkpointer = checkpointer
        self.metric = metric
        self.sign = -1 if LOSS_TASK in metric.split("/") else 1
        self.best: float | None = None
        self.best_iteration: int | None = None
        self.waited = 0
        self._compared: int | None = None

    def after_step(self) -> None:
        self._compare()

    def after_train(self) -> None:
        self._compare()
        if self.best is None:
            known = ", ".join(name for name in self.trainer.storage.latest() if "/" in name) or "none"
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
