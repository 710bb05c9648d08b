"""Hooks of the trainer: schedules, moving average, checkpoints and metrics. Writers of metrics."""

import contextlib
import datetime
import json
import logging
import math
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.engine import HookBase, TrainerBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventWriter, JSONWriter, get_event_storage
from detectron2.utils.logger import log_first_n
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from backbones import ConfigError
from backbones.attention.efficient import PerformerAttention, redraw_features
from backbones.attention.sliding_chunk import sample_shifts
from backbones.errors import one_line
from backbones.files import write_text
from projects_vil.checkpoint import remove_old
from projects_vil.modeling.micro_batches import loss_normalizers
from projects_vil.solver import main_group
from projects_vil.utils import memory_of

# Metrics that differ between two identical runs.
TIMES = ("time", "data_time", "rank_data_time", "eta_seconds")
# Writers report the median of this many values, as in detectron2.
SMOOTHING_WINDOW = 20


# -- exact resume ----------------------------------------------------------------------------------


class MetricsHistory(HookBase):
    """Save the last values of each metric in the checkpoint, because ``metrics.json`` has their medians."""

    _saved: Mapping[str, Any] = {}

    def before_train(self) -> None:
        for name, (values, smoothed) in self._saved.items():
            for value, iteration in values:
                self.trainer.storage.put_scalar(name, value, smoothing_hint=smoothed, cur_iter=int(iteration))

    def state_dict(self) -> dict[str, Any]:
        storage = self.trainer.storage
        hints = storage.smoothing_hints()
        return {
            name: [[list(pair) for pair in history.values()[-SMOOTHING_WINDOW:]], hints[name]]
            for name, history in storage.histories().items()
            if name not in TIMES
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


# -- schedules: functions of the iteration, so that all processes and resumed runs agree -----------


class LRScheduler(hooks.LRScheduler):
    """detectron2's hook, with the learning rates of the config after a resume.

    The logged ``lr`` belongs to :func:`~projects_vil.solver.main_group`. detectron2 logs the largest group, which may
    be a single layer under layer-wise decay.
    """

    def before_train(self) -> None:
        super().before_train()
        self._best_param_group_id = main_group(self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scheduler = self.scheduler
        super().load_state_dict(state_dict | {"base_lrs": scheduler.base_lrs})
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_lr(), strict=True):
            group["lr"] = lr


class RedrawFeatures(HookBase):
    """Resample Performer's random features every ``FEATURE_REDRAW_PERIOD`` iterations (ViL, appendix D)."""

    def before_train(self) -> None:
        """Broadcast the features of rank 0. DistributedDataParallel does not share these buffers."""
        if comm.get_world_size() > 1:
            for module in self.trainer.model.modules():
                if isinstance(module, PerformerAttention):
                    torch.distributed.broadcast(module.features, src=0)

    def before_step(self) -> None:
        if self.trainer.iter and self.trainer.iter % self.trainer.cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD == 0:
            redraw_features(self.trainer.model, seed=self.trainer.iter)


def sample_random_shifts(trainer: TrainerBase) -> None:
    """Sample one neighboring chunk for each layer of ViL's attention, in the first ``RANDOM_SHIFT_FRACTION`` of a run.

    Call it before each step. In the rest of the run, the layers attend to all neighboring chunks.
    """
    is_on = trainer.iter < trainer.cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION * trainer.max_iter
    sample_shifts(trainer.model, seed=trainer.iter if is_on else None)


# -- exponential moving average --------------------------------------------------------------------


class ExponentialAverage(AveragedModel):
    """A moving average of a model with a decay of min(decay, (1 + n) / (10 + n)) after n steps.

    The average starts with the weights after the first step. Buffers are copied from the model.

    Args:
        model: A model without DistributedDataParallel.
        decay: The limit of the decay, at least 0 and below 1.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        super().__init__(model, device=next(model.parameters()).device)
        self.decay = decay
        self.requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, has_stepped: Tensor) -> None:
        """Update the average without synchronizing with the device.

        Args:
            model: The model of the average.
            has_stepped: Whether the last step changed the model, 1 or 0, on the device of the model.
        """
        averages, steps = list(self.module.parameters()), self.n_averaged
        rate = (9 / (10 + steps)).clamp(min=1 - self.decay)
        rate = torch.where(steps > 0, rate, 1.0) * has_stepped
        differences = torch._foreach_sub(list(model.parameters()), averages)
        torch._foreach_mul_(differences, rate)
        torch._foreach_add_(averages, differences)
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            average.copy_(buffer)
        self.n_averaged += has_stepped.long()


# -- checkpoints, metrics and evaluations ----------------------------------------------------------


class PeriodicCheckpointer(HookBase):
    """Save every ``CHECKPOINT_PERIOD`` iterations, at the end, and when a signal stops the run; every rank has it.

    A checkpoint is saved before the evaluation of the same iteration, and again after it by :meth:`save_evaluated`. A
    run that resumes from the first one repeats the evaluation.

    Attributes:
        last_saved: Last iteration with a checkpoint, or None.
    """

    last_saved: int | None = None

    def after_step(self) -> None:
        done, max_iter, stop = self.trainer.iter + 1, self.trainer.max_iter, self.trainer.stop_signal()
        if done % self.trainer.cfg.SOLVER.CHECKPOINT_PERIOD == 0 or (stop and done < max_iter):
            self.save(f"model_{self.trainer.iter:07d}")
        if done >= max_iter:
            self.save("model_final")
        elif stop:
            logging.getLogger(__name__).warning(
                "%s: saved after iteration %d; continue with --resume", signal.Signals(stop).name, self.trainer.iter
            )
            # No rank exits while rank 0 still writes.
            comm.synchronize()
            raise SystemExit(128 + stop)

    def save_evaluated(self, trainer: TrainerBase) -> None:
        """Save the checkpoint of an iteration again with the result of its evaluation, as the last hook."""
        done, period, eval_period = trainer.iter + 1, trainer.cfg.SOLVER.CHECKPOINT_PERIOD, trainer.cfg.TEST.EVAL_PERIOD
        if eval_period and done % math.lcm(eval_period, period) == 0 and done < trainer.max_iter:
            self.save(f"model_{trainer.iter:07d}", finished=True)

    def save(self, name: str, *, finished: bool = False, normalizers: list[float | None] | None = None) -> None:
        """Save a checkpoint. All ranks call this, unless ``normalizers`` is set.

        Args:
            name: File name without suffix.
            finished: Whether the iteration has been evaluated and logged.
            normalizers: Result of :func:`~projects_vil.modeling.micro_batches.loss_normalizers`.
        """
        trainer, keep = self.trainer, self.trainer.cfg.SOLVER.CHECKPOINT_MAX_TO_KEEP
        normalizers = normalizers or loss_normalizers(trainer.checkpointer.model)
        contents = {"iteration": trainer.iter, "seed": trainer.seed, "loss_normalizers": normalizers}
        trainer.checkpointer.save(name, finished=finished, **contents)
        self.last_saved = trainer.iter
        if keep and comm.is_main_process():
            remove_old(trainer.cfg.OUTPUT_DIR, keep=keep)


class PeriodicWriter(hooks.PeriodicWriter):
    """detectron2's hook, which also writes the first iteration to the log, and every evaluation.

    The writers are built at the start of the training, when the first iteration of a resumed run is known. At the end
    each writer is closed, even if another writer fails.
    """

    def before_train(self) -> None:
        self._writers = self.trainer.build_writers()

    def after_step(self) -> None:
        super().after_step()
        iteration, eval_period = self.trainer.iter, self.trainer.cfg.TEST.EVAL_PERIOD
        is_evaluated = eval_period and (iteration + 1) % eval_period == 0
        for writer in self._writers:
            # The first line of a resumed run must not be in metrics.json: an uninterrupted run has none.
            is_first = iteration == self.trainer.start_iter and isinstance(writer, CommonMetricPrinter)
            # A writer writes an iteration once.
            if is_evaluated or is_first:
                writer.write()

    def after_train(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)
                stack.callback(writer.write)


class ProgressBar(HookBase):
    """Show a line per epoch in the terminal, with the remaining time of the run and the losses.

    Args:
        images: Number of training images; 0 if it is unknown. The whole run then counts as one epoch.
    """

    def __init__(self, images: int) -> None:
        self.images = images
        self._bar: tqdm | None = None

    def after_step(self) -> None:
        trainer, done, batch = self.trainer, self.trainer.iter + 1, self.trainer.cfg.SOLVER.IMS_PER_BATCH
        length = self.images / batch or trainer.max_iter
        epoch = int(trainer.iter / length)
        # The first iteration of this epoch, and the first one after it.
        first, end = (min(math.ceil(number * length), trainer.max_iter) for number in (epoch, epoch + 1))
        if self._bar is None:
            # A terminal of a container may have 0 columns, and tqdm would print nothing. This function returns 80 then.
            options = {"ncols": shutil.get_terminal_size().columns}
            options |= {"bar_format": "{desc} {bar:20} {n_fmt}/{total_fmt}{postfix}"}
            title = f"epoch {epoch + 1}/{math.ceil(trainer.max_iter / length)}"
            self._bar = tqdm(desc=title, total=end - first, file=sys.stdout, **options)
        histories = trainer.storage.histories()
        losses = [(name, history.median(SMOOTHING_WINDOW)) for name, history in histories.items() if "loss" in name]
        parts = [f"{name.removeprefix('loss_')} {value:.3g}" for name, value in losses]
        if "time" in histories:
            seconds = histories["time"].median(1000)
            left = datetime.timedelta(seconds=round(seconds * (trainer.max_iter - done)))
            parts = [f"eta {left}", f"{batch / seconds:.3g} images/s", *parts]
        self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update(done - first - self._bar.n)
        eval_period = trainer.cfg.TEST.EVAL_PERIOD
        if done == end or (eval_period and done % eval_period == 0):
            self.after_train()

    def after_train(self) -> None:
        """Close the line. Evaluations print below it."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


class BestCheckpointer(hooks.BestCheckpointer):
    """detectron2's hook, in rank 0, which resumes with the best value.

    Attributes:
        evaluations_since_best: Number of evaluations since the best one.
    """

    evaluations_since_best = 0

    def _best_checking(self) -> None:
        before = self.best_iter
        super()._best_checking()
        self.evaluations_since_best = 0 if self.best_iter != before else self.evaluations_since_best + 1

    def state_dict(self) -> dict[str, Any]:
        state = {"best": self.best_metric, "best_iteration": self.best_iter, "waited": self.evaluations_since_best}
        return state | {"metric": self._val_metric}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["metric"] == self._val_metric:
            self.best_metric, self.best_iter = state_dict["best"], state_dict["best_iteration"]
            self.evaluations_since_best = state_dict["waited"]


# -- writers ---------------------------------------------------------------------------------------


class MetricPrinter(CommonMetricPrinter):
    """detectron2's log line, and a second line with gradient norm, images per second, data wait and memory.

    Args:
        max_iter: Number of iterations of the run.
        batch_size: Images per iteration in all processes.
    """

    def __init__(self, max_iter: int, *, batch_size: int) -> None:
        super().__init__(max_iter)
        self.batch_size = batch_size
        self._last_iteration: int | None = None

    def write(self) -> None:
        storage = get_event_storage()
        # detectron2 estimates the remaining time from the iterations since the last line.
        if storage.iter in (self._max_iter, self._last_iteration):
            return
        self._last_iteration = storage.iter
        super().write()
        histories, parts = storage.histories(), [f"iter: {storage.iter}"]
        if "gradient_norm" in histories:
            # The median, as in metrics.json.
            norm, _ = storage.latest_with_smoothing_hint(SMOOTHING_WINDOW)["gradient_norm"]
            parts.append(f"gradient_norm: {norm:.4g}")
        if histories.keys() >= {"time", "data_time"}:
            seconds, waited = (
                histories[name].avg(storage.count_samples(name, SMOOTHING_WINDOW)) for name in ("time", "data_time")
            )
            parts.append(f"images/s: {self.batch_size / seconds:.3g}")
            parts.append(f"data_wait: {min(waited / seconds, 1):.0%}")
        if (memory := memory_of(peak=True)) is not None:
            parts.append(f"max_rss: {memory / 2**20:.0f}M")
        self.logger.info(" %s", "  ".join(parts))


class MetricsFile(JSONWriter):
    """detectron2's writer of ``metrics.json``, without repeated iterations in a resumed run.

    Args:
        path: The file. An incomplete last line, and the lines of ``first_iteration`` and later iterations, are removed.
        first_iteration: First iteration of the run.
    """

    def __init__(self, path: Path, *, first_iteration: int = 0) -> None:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _iteration(line) < first_iteration]
        if len(kept) < len(lines):
            write_text(path, "".join(f"{line}\n" for line in kept))
        super().__init__(str(path), SMOOTHING_WINDOW)
        self._last_write = max(map(_iteration, kept), default=-1)


def _iteration(line: str) -> float:
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


# -- services, imported only if a key of LOGGING enables them --------------------------------------


class ServiceWriter(EventWriter):
    """Log each finite scalar to a service once, with its iteration.

    Args:
        log: Function of a dict of scalars and their iteration.
        close: Function that ends the run of the service.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], close: Callable[[], object]) -> None:
        self.log = log
        self.close = close
        self._last_write = -1

    def write(self) -> None:
        new: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, iteration) in get_event_storage().latest_with_smoothing_hint(SMOOTHING_WINDOW).items():
            if iteration > self._last_write and math.isfinite(value):
                new[iteration][name] = value
        for iteration, values in sorted(new.items()):
            self.log(values, iteration)
            self._last_write = iteration


def wandb_writer(cfg: CfgNode) -> ServiceWriter:
    """Start a Weights & Biases run in the project ``LOGGING.WANDB_PROJECT``.

    ``WANDB_...`` environment variables configure it. A resumed run is a new run in the group named after its
    ``OUTPUT_DIR``.

    Raises:
        ConfigError: If wandb does not start.
    """
    import wandb

    group, config = Path(cfg.OUTPUT_DIR).resolve().name, yaml.safe_load(cfg.dump())
    try:
        run = wandb.init(project=cfg.LOGGING.WANDB_PROJECT, group=group, dir=cfg.OUTPUT_DIR, config=config)
    except wandb.errors.Error as error:
        raise ConfigError(f"LOGGING.WANDB_PROJECT: {one_line(error)}. Fix this, or set WANDB_MODE=offline.") from error
    return ServiceWriter(lambda values, iteration: run.log(values, step=iteration), run.finish)


def mlflow_writer(cfg: CfgNode) -> ServiceWriter:
    """Start an MLflow run in the experiment ``LOGGING.MLFLOW_EXPERIMENT``, at ``MLFLOW_TRACKING_URI``.

    Raises:
        ConfigError: If the run cannot be created.
    """
    import mlflow

    client = mlflow.MlflowClient()
    try:
        experiment = mlflow.set_experiment(cfg.LOGGING.MLFLOW_EXPERIMENT).experiment_id
        run_id = client.create_run(experiment, run_name=Path(cfg.OUTPUT_DIR).resolve().name).info.run_id
        client.log_text(run_id, cfg.dump(), "config.yaml")
    except mlflow.exceptions.MlflowException as error:
        raise ConfigError(f"LOGGING.MLFLOW_EXPERIMENT: {one_line(error)}. Check MLFLOW_TRACKING_URI.") from error

    def log(values: dict[str, float], iteration: int) -> None:
        try:
            for name, value in values.items():
                # MLflow allows only these characters in names.
                client.log_metric(run_id, re.sub(r"[^\w\-./ ]", "_", name), value, step=iteration)
        except mlflow.exceptions.MlflowException as error:
            # metrics.json has all values, so a server failure need not end the run.
            log_first_n(logging.WARNING, f"MLflow: {one_line(error)}; training continues", name=__name__)

    def close() -> None:
        with contextlib.suppress(mlflow.exceptions.MlflowException):
            client.set_terminated(run_id)

    return ServiceWriter(log, close)


# Key of LOGGING -> the package and the writer of a service.
SERVICES = {"WANDB_PROJECT": ("wandb", wandb_writer), "MLFLOW_EXPERIMENT": ("mlflow", mlflow_writer)}
