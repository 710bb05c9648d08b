"""What follows from evaluations: the best checkpoint, and an early end."""

import logging
import math
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from projects_vil.checkpoint import Checkpointer
from projects_vil.engine.hooks.saving import SaveCheckpoints


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
