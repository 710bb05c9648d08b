"""The trainer of YAML configs and LazyConfigs, and its step: gradient accumulation, mixed precision, divergence."""

import contextlib
import functools
import json
import logging
import math
import signal
import sys
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, create_ddp_model
from detectron2.engine.hooks import CallbackHook, EvalHook, IterationTimer, PreciseBN
from detectron2.evaluation import DatasetEvaluator
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, TensorboardXWriter, get_event_storage, has_event_storage
from detectron2.utils.logger import setup_logger
from fvcore.nn.precise_bn import get_bn_modules
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from backbones import ConfigError
from backbones.attention.efficient import PerformerAttention
from backbones.checkpoint_files import atomic_write
from projects_vil import data, evaluation, solver
from projects_vil.checkpoint import Checkpointer, fingerprint
from projects_vil.config import one_line, with_overrides
from projects_vil.engine import hooks
from projects_vil.engine.writers import MetricPrinter, MetricsFile, build_service_writers
from projects_vil.evaluation import LOSS_TASK, split_metric_name, validation_loss, write_results
from projects_vil.modeling import MicroBatches, autocast_detector, avoid_waits
from projects_vil.utils import read_json, stop_requests, terminate, terminating_between_calls
from projects_vil.visualization import draw_evaluation

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Keys of parameter groups that a resumed run takes from its config.
_RATES = {"initial_lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum"}
NONFINITE_FILE = "nonfinite.json"
# Consecutive steps that the float16 loss scaler may skip: from any scale that it grows to, it is below 1 by then.
MAX_OVERFLOWS = 32


class TrainStep(SimpleTrainer):
    """detectron2's step, with gradient accumulation and mixed precision, after which all weights are finite.

    Where a loss or the norm of the gradients is not finite, all processes skip the batch, or stop: weights, optimizer
    and BatchNorm statistics stay as before the step. The images, losses and learning rate go to ``nonfinite.json``.
    Gradients that overflow under the float16 loss scaler are not such a case: it lowers its scale.

    Args:
        model, data_loader, optimizer: as detectron2's; the optimizer raises FloatingPointError for gradients that are
            not finite (:func:`projects_vil.solver.clip_full_model`).
        output_dir: of ``nonfinite.json``.
        accumulate: number of micro-batches of a batch; the gradients are those of the whole batch, as far as
            :class:`~projects_vil.modeling.MicroBatches` can compute them.
        precision: dtype of autocast, None for none; float16 scales the loss.
        max_skipped: how many batches may be skipped before the run stops.

    Attributes:
        has_stepped: whether the last step changed the weights.
        skipped: number of batches that were skipped.
        received: signals that ask this process to stop.
        stop_signal: one of them that any process had received before the last backward pass; else 0.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        *,
        output_dir: str | Path,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        max_skipped: int = 0,
    ) -> None:
        super().__init__(model, data_loader, optimizer)
        self.output_dir = Path(output_dir)
        self.accumulate = accumulate
        self.precision = precision
        self.max_skipped = max_skipped
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if precision == torch.float16 else None
        self.has_stepped = False
        self.skipped = self.overflows = 0
        self.received: list[int] = []
        self.stop_signal = 0

    def run_step(self) -> None:
        """Train on the next batch.

        Raises:
            ConfigError: in all processes, if it diverged and no more batches may be skipped.
        """
        start = time.perf_counter()
        images = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        batch = MicroBatches(unwrapped(self.model))
        statistics = [(buffer, buffer.clone()) for buffer in _statistics(self.model)]
        self.optimizer.zero_grad()
        self.has_stepped = False
        losses, seen, reason = self._backward(images, batch)
        reason = reason or self._update(losses)
        if reason:
            self.optimizer.zero_grad()
            batch.restore()
            for buffer, before in statistics:
                buffer.copy_(before)
            self._skip(reason, losses, seen)
        else:
            self._record(losses, images, data_time, statistics)

    def settle(self) -> None:
        """Do nothing: a host that waits for each step knows of all."""

    def _record(
        self, losses: dict[str, float], images: list[dict[str, Any]], data_time: float, statistics: Sequence
    ) -> None:
        """Write the metrics of an iteration that may have changed the weights."""
        terms = {name: torch.tensor(value, dtype=torch.float64) for name, value in losses.items()}
        self.write_metrics(terms, data_time, self.iter)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"skipped": self.skipped, "overflows": self.overflows}
        return state if self.scaler is None else state | {"grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint's state; learning rates, weight decays and momentum are those of the config.

        Raises:
            ConfigError: if it has no optimizer, or one with other groups of parameters.
        """
        own, saved = self.optimizer.state_dict()["param_groups"], state_dict.get("optimizer")
        if saved is None or _group_types(saved["param_groups"]) != _group_types(own):
            raise ConfigError(
                "the checkpoint has no optimizer state for this config's optimizer, LR_MULTIPLIERS and frozen stages: "
                "resume with SOLVER and MODEL.BACKBONE.FREEZE_AT of its config.yaml, or start from its weights "
                "(MODEL.WEIGHTS, without --resume, in another OUTPUT_DIR)"
            )
        pairs = list(zip(saved["param_groups"], own, strict=True))
        changed = [name for key, name in _RATES.items() if any(old.get(key) != new.get(key) for old, new in pairs)]
        if changed:
            logging.getLogger(__name__).warning("this config has another %s than the resumed run", ", ".join(changed))
        super().load_state_dict(state_dict | {"optimizer": saved | {"param_groups": own}})
        self.skipped, self.overflows = state_dict.get("skipped", 0), state_dict.get("overflows", 0)
        if self.scaler is not None and "grad_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["grad_scaler"])

    def start(self, iteration: int) -> None:
        """Remove an iteration and later ones from ``nonfinite.json``: they are trained again."""
        if comm.is_main_process():
            _write_nonfinite(self.output_dir / NONFINITE_FILE, before=iteration)

    def _backward(
        self, images: list[dict[str, Any]], batch: MicroBatches
    ) -> tuple[dict[str, float], list[dict[str, Any]], str]:
        """Compute the gradients of all micro-batches.

        Returns:
            The losses of the batch, its images, and ""; or those of the last micro-batch and the reason if one
            diverged, in this process or another.
        """
        size, is_distributed = len(images) // self.accumulate, comm.get_world_size() > 1
        weighted: dict[str, float] = defaultdict(float)
        divisor = 1.0
        for index in range(self.accumulate):
            part, is_last = images[index * size : (index + 1) * size], index == self.accumulate - 1
            with contextlib.nullcontext() if is_last or not is_distributed else self.model.no_sync():
                batch.restore()
                total, losses, reason = self._forward(part)
                # In all processes once per iteration, and before the backward pass in which they wait for each other.
                if reason or is_last:
                    reason = self._sync_stop(reason)
                if reason:
                    return losses, part, reason
                weight = batch.weight(len(part))
                if index == 0:
                    # An estimate: the divisor is known after the last micro-batch.
                    divisor = weight * self.accumulate
                if is_last and divisor != (exact := batch.divisor()):
                    gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
                    torch._foreach_mul_([grad for grad in gradients if grad is not None], divisor / exact)
                    divisor = exact
                for name, value in losses.items():
                    weighted[name] += value * weight
                total = total * (weight / divisor)
                (total if self.scaler is None else self.scaler.scale(total)).backward()
        self.after_backward()
        return {name: value / divisor for name, value in weighted.items()}, images, ""

    def _forward(self, part: list[dict[str, Any]]) -> tuple[Tensor, dict[str, float], str]:
        """Return the loss, its terms, and which of them are not finite."""
        try:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                terms = self.model(part)
        except FloatingPointError as error:  # detectron2's, for proposals
            return torch.tensor(math.nan), {}, one_line(error).removesuffix(" Training has diverged.")
        values = torch.stack([value.detach().double() for value in terms.values()]).tolist()
        losses = dict(zip(terms, values, strict=True))
        return sum(terms.values()), losses, _not_finite(losses)

    def _sync_stop(self, reason: str) -> str:
        """Return a reason of any process, and note a stop signal of any process."""
        self.stop_signal = max(self.received, default=0)
        if comm.get_world_size() == 1:
            return reason
        flags = torch.tensor([int(bool(reason)), self.stop_signal], device=self.device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        has_failed, self.stop_signal = flags.tolist()
        return next(filter(None, comm.all_gather(reason))) if has_failed else ""

    def _update(self, losses: dict[str, float]) -> str:
        """Take the optimizer's step; return why the run has diverged, or ""."""
        try:
            if self.scaler is None:
                self.optimizer.step()
                self.has_stepped = True
                return ""
            scale = self.scaler.get_scale()
            # Before the norm is taken, also where the optimizer is fused.
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
        except FloatingPointError as error:
            return str(error)
        finally:
            if self.scaler is not None:
                self.scaler.update()
        self.has_stepped = self.scaler.get_scale() >= scale
        self.overflows = 0 if self.has_stepped else self.overflows + 1
        if self.overflows < MAX_OVERFLOWS:
            return ""
        return f"the gradients overflowed in {self.overflows} consecutive steps, with a loss scale of {scale:g}"

    def _skip(
        self,
        reason: str,
        losses: dict[str, float],
        images: Sequence[dict[str, Any]],
        *,
        iteration: int | None = None,
        rate: float | None = None,
    ) -> None:
        """Write what diverged, in all processes, and continue or stop; by default in the current iteration."""
        iteration = self.iter if iteration is None else iteration
        self.skipped += 1
        is_skipped = self.skipped <= self.max_skipped
        rate = self._learning_rate() if rate is None else rate
        own = {
            "losses": {name: value if math.isfinite(value) else str(value) for name, value in losses.items()},
            "images": [{key: image.get(key) for key in ("image_id", "file_name")} for image in images],
        }
        processes = comm.gather(own)
        path = self.output_dir / NONFINITE_FILE
        if comm.is_main_process():
            entry = {"iteration": iteration, "reason": reason, "learning_rate": rate, "is_skipped": is_skipped}
            _write_nonfinite(path, before=iteration, new=[entry | {"processes": processes}])
        # The first process that raises ends the others.
        comm.synchronize()
        message = f"diverged in iteration {iteration}: {reason} (learning rate {rate:g}, images and losses in {path})"
        if not is_skipped:
            raise ConfigError(
                f"{message}; no weight has changed: --resume from the last checkpoint with a lower SOLVER.BASE_LR, or "
                f"skip such batches with SOLVER.MAX_NONFINITE_STEPS {max(2 * self.max_skipped, 10)}"
            )
        logging.getLogger(__name__).warning(
            "%s; the batch is skipped, %d of SOLVER.MAX_NONFINITE_STEPS %d", message, self.skipped, self.max_skipped
        )

    def _learning_rate(self) -> float:
        return self.optimizer.param_groups[solver.main_group(self.optimizer)]["lr"]


class DeferredStep(TrainStep):
    """The step on a GPU: the host waits for the device in :meth:`settle` only, which the trainer calls now and then.

    What diverges is found on the device, where ``found_inf`` makes the step of a fused optimizer one without effect;
    so are all steps after more batches have diverged than may be skipped, until the host learns of it.

    Attributes:
        has_stepped: a tensor on the device, 1 or 0; False where the host knows.
        stop_signal: one of any process, as of the last call of :meth:`settle`.
    """

    has_stepped: Tensor | bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Values on the device, and what belongs to them on the host, of iterations that have not been settled.
        self._pending: list[tuple[Tensor, dict[str, Any]]] = []
        # On the device; None while the host knows it.
        self._num_failed: Tensor | None = None

    @staticmethod
    def supports(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is fused on a GPU, and no process leaves an iteration alone.

        detectron2 raises an error for proposals that are not finite, in one process, while others wait for gradients.
        """
        is_cuda = next(model.parameters()).device.type == "cuda"
        is_alone = comm.get_world_size() == 1 or not hasattr(model, "proposal_generator")
        return is_cuda and is_alone and getattr(optimizer, "_step_supports_amp_scaling", False)

    def settle(self) -> None:
        """Write the metrics of all iterations since the last call, skip or stop for those that diverged.

        All processes call this after the same iteration.

        Raises:
            ConfigError: as :meth:`run_step`.
        """
        pending, self._pending, self._num_failed = self._pending, [], None
        rows = torch.cat([values for values, _ in pending]).tolist() if pending else []
        for values, host in pending:
            row, rows = rows[: len(values)], rows[len(values) :]
            *losses, norm, has_failed, has_diverged, stop_signal = row
            self.stop_signal = int(stop_signal)
            losses = dict(zip(host["names"], losses, strict=True))
            reason = ""
            if has_failed and (has_diverged or self.scaler is None):
                reasons = comm.all_gather(_not_finite(losses))
                reason = next(filter(None, reasons), f"the norm of the gradients is {norm}")
            else:
                self.overflows = self.overflows + 1 if has_failed else 0
                if self.overflows >= MAX_OVERFLOWS:
                    reason = f"the gradients overflowed in {self.overflows} consecutive steps"
            if reason:
                self._skip(reason, losses, host["images"], iteration=host["iteration"], rate=host["rate"])
                continue
            terms = {name: torch.tensor(value, dtype=torch.float64) for name, value in losses.items()}
            self.write_metrics(terms, host["data_time"], host["iteration"])
            if host["is_clipped"] and not has_failed:
                get_event_storage().put_scalar("gradient_norm", norm, cur_iter=host["iteration"])

    def _forward(self, part: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor], str]:
        # What detectron2 draws must be on the host.
        if not getattr(unwrapped(self.model), "vis_period", 0):
            part = [{key: _on_device(value, self.device) for key, value in image.items()} for image in part]
        try:
            with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                terms = self.model(part)
        except FloatingPointError as error:  # detectron2's, for proposals: the host knows
            self.settle()
            return torch.tensor(math.nan), {}, one_line(error).removesuffix(" Training has diverged.")
        return sum(terms.values()), {name: value.detach().double() for name, value in terms.items()}, ""

    def _sync_stop(self, reason: str) -> str:
        return reason

    def _update(self, losses: dict[str, Tensor]) -> str:
        optimizer, signal_number = self.optimizer, max(self.received, default=0)
        values = torch.stack(list(losses.values()))
        # Filled on the device: a copy of a value would be one that the host waits for.
        stop = torch.full((), float(signal_number), dtype=torch.float64, device=self.device)
        flags = torch.stack([(~values.isfinite()).any().double(), stop])
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        if self._num_failed is None:
            self._num_failed = torch.full((), float(min(self.skipped, self.max_skipped)), device=self.device)
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        has_diverged, has_ended = flags[0].float(), (self._num_failed > self.max_skipped).float()
        optimizer.grad_scale, optimizer.found_inf = None, torch.maximum(has_diverged, has_ended)
        # Filled by the hook of clip_full_model.
        optimizer.deferred_norms = []
        try:
            optimizer.step()
            has_failed, norms = optimizer.found_inf, optimizer.deferred_norms
        finally:
            del optimizer.grad_scale, optimizer.found_inf, optimizer.deferred_norms
        norm, self._is_clipped = norms[0] if norms else (torch.zeros_like(has_failed), False)
        if self.scaler is not None:
            one = torch.ones((), device=self.device)
            before = self.scaler.scale(one)
            self.scaler.update()
            # Only overflows lower it.
            self.scaler.update(torch.where(has_diverged > 0, before, self.scaler.scale(one)))
        self._num_failed = self._num_failed + (has_failed if self.scaler is None else has_diverged)
        self.has_stepped = 1 - has_failed
        self._values = torch.cat([values, torch.stack([norm, has_failed]).double(), flags])
        return ""

    def _record(
        self, losses: dict[str, Tensor], images: list[dict[str, Any]], data_time: float, statistics: Sequence
    ) -> None:
        for buffer, before in statistics:
            buffer.copy_(torch.where(self.has_stepped > 0, buffer, before))
        seen = [{key: image.get(key) for key in ("image_id", "file_name")} for image in images]
        host = {"iteration": self.iter, "images": seen, "rate": self._learning_rate(), "data_time": data_time}
        host |= {"names": list(losses), "is_clipped": self._is_clipped}
        self._pending.append((self._values, host))


class Trainer(DefaultTrainer):
    """Train, evaluate and resume a detector, as detectron2's DefaultTrainer.

    A run that is resumed ends as one that never stopped, to the bit on a CPU: each iteration is seeded by the run's
    seed (:class:`~projects_vil.engine.hooks.SeedIterations`), and so is each image (:mod:`projects_vil.data.samplers`).

    Args:
        cfg: all options of the run. A subclass may build model, optimizer, loader and schedule otherwise, as
            :class:`projects_vil.engine.lazy.LazyTrainer` does; an exact resume needs a loader as
            :class:`projects_vil.data.samplers.TrainLoader`.
        log_period: iterations between two lines of the log and of ``metrics.json``.

    Attributes:
        seed: the seed of the run.
        averaged: torch's averaged model with ``MODEL.EMA.ENABLED``, which is what is evaluated; else None.
    """

    averaged: AveragedModel | None = None
    build_optimizer = staticmethod(solver.build_optimizer)
    build_lr_scheduler = staticmethod(solver.build_lr_scheduler)
    build_train_loader = staticmethod(data.build_train_loader)
    build_test_loader = staticmethod(data.build_test_loader)

    def __init__(self, cfg: CfgNode, *, log_period: int = 20) -> None:
        # Not DefaultTrainer's, which builds its own step, and DistributedDataParallel only for GPUs.
        TrainerBase.__init__(self)
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        if cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS == "auto":
            raise ConfigError(
                "SOLVER.GRADIENT_ACCUMULATION_STEPS is 'auto', which only 'vil train' and tools/train_net.py resolve. "
                "Set it to a number."
            )
        self.cfg = cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        options, on_gpu = cfg.SOLVER, cfg.MODEL.DEVICE.startswith("cuda")
        if on_gpu:
            avoid_waits(model)
        device_ids = [comm.get_local_rank()] if on_gpu else None
        step_class = DeferredStep if DeferredStep.supports(model, optimizer) else TrainStep
        self._trainer = step_class(
            create_ddp_model(model, broadcast_buffers=False, device_ids=device_ids, gradient_as_bucket_view=True),
            self.build_train_loader(cfg),
            optimizer,
            output_dir=cfg.OUTPUT_DIR,
            accumulate=options.GRADIENT_ACCUMULATION_STEPS,
            precision=amp_dtype(options.AMP.DTYPE, on_gpu=on_gpu) if options.AMP.ENABLED else None,
            max_skipped=options.MAX_NONFINITE_STEPS,
        )
        if cfg.MODEL.EMA.ENABLED:
            self.averaged = hooks.ExponentialAverage(model, decay=cfg.MODEL.EMA.DECAY)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(
            self.model, cfg.OUTPUT_DIR, cfg=cfg, averaged=self.averaged, trainer=weakref.proxy(self)
        )
        self.log_period = log_period
        self.start_iter, self.max_iter = 0, options.MAX_ITER
        self.seed = cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
        # Whether the last iteration of the checkpoint that was resumed may lack its evaluation and metrics.
        self._is_unfinished = False
        self._metrics_file: MetricsFile | None = None
        self.register_hooks(self.build_hooks())

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        folder = Path(cfg.OUTPUT_DIR) / "inference"
        if len(cfg.DATASETS.TEST) > 1:
            folder /= dataset_name
        return evaluation.build_evaluator(cfg, dataset_name, str(folder))

    def build_hooks(self) -> list[HookBase]:
        options, test, transformer = self.cfg.SOLVER, self.cfg.TEST, self.cfg.MODEL.TRANSFORMER
        model, is_main, eval_period = unwrapped(self.model), comm.is_main_process(), test.EVAL_PERIOD
        before: list[HookBase] = [hooks.SeedIterations(), hooks.MetricsHistory()]
        if transformer.RANDOM_SHIFT_FRACTION:
            before.append(hooks.RandomShift(model, transformer.RANDOM_SHIFT_FRACTION))
        if any(isinstance(module, PerformerAttention) for module in model.modules()):
            before.append(hooks.RedrawFeatures(transformer.FEATURE_REDRAW_PERIOD))
        before += [IterationTimer(), hooks.LRScheduler(scheduler=self.scheduler)]
        if test.PRECISE_BN.ENABLED and get_bn_modules(model):
            loader = self.build_train_loader(self.cfg)
            before.append(PreciseBN(eval_period, self.model, loader, test.PRECISE_BN.NUM_ITER))
        if self.averaged is not None:
            before.append(CallbackHook(after_step=Trainer._update_average))
        saving = hooks.PeriodicCheckpointer(
            self.checkpointer, period=options.CHECKPOINT_PERIOD, max_to_keep=options.CHECKPOINT_MAX_TO_KEEP
        )
        self._saving, best = saving, None
        after: list[HookBase] = [EvalHook(eval_period, self._evaluate)]
        if test.BEST_METRIC and is_main:
            mode = "min" if split_metric_name(self.cfg)[1] == LOSS_TASK else "max"
            best = hooks.BestCheckpointer(eval_period, self.checkpointer, test.BEST_METRIC, mode)
            after.append(best)
        if is_main:
            writers = self.build_writers()
            after.append(hooks.PeriodicWriter(writers, self.log_period))
            after.append(CallbackHook(after_step=functools.partial(_write_evaluation, writers)))
        after.append(CallbackHook(after_step=saving.save_evaluated))
        if options.EARLY_STOPPING_PATIENCE:
            after.append(hooks.EarlyStopping(best, saving))
        # What an iteration still does once its checkpoint is written.
        self._after_saving = after
        return [*before, saving, *after]

    def run_step(self) -> None:
        """Train on a batch; on a GPU wait for the device before anything is written, saved or evaluated."""
        super().run_step()
        done = self.iter + 1
        periods = (self.log_period, self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD)
        is_edge = self.iter == self.start_iter or done >= self.max_iter
        if is_edge or any(period and done % period == 0 for period in periods):
            self._trainer.settle()

    def state_dict(self) -> dict[str, Any]:
        # Before the hooks tell theirs: after a signal any iteration may be saved.
        self._trainer.settle()
        return super().state_dict()

    def _update_average(self) -> None:
        has_stepped = self._trainer.has_stepped
        # A tensor where the host does not know: the average itself is computed with it.
        if isinstance(has_stepped, Tensor) or has_stepped:
            self.averaged.update_parameters(unwrapped(self.model), has_stepped)

    def build_writers(self) -> list[EventWriter]:
        """Return detectron2's writers: the log, TensorBoard, and ``metrics.json``; and services of ``LOGGING``."""
        printer = MetricPrinter(self.max_iter, batch_size=self.cfg.SOLVER.IMS_PER_BATCH)
        self._metrics_file = MetricsFile(Path(self.cfg.OUTPUT_DIR) / "metrics.json")
        tensorboard = TensorboardXWriter(self.cfg.OUTPUT_DIR)
        return [printer, tensorboard, self._metrics_file, *build_service_writers(self.cfg)]

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from the last checkpoint in ``OUTPUT_DIR``, or load ``MODEL.WEIGHTS``.

        The seed of a resumed run is that of its checkpoint.
        """
        contents = self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        logger, path = logging.getLogger(__name__), self.checkpointer.resumed_from
        if path is not None:
            self.start_iter = self.iter + 1
            self.seed = contents.get("seed", self.seed)
            if self.cfg.SEED not in (-1, self.seed):
                logger.warning("SEED is %d, and the resumed run has %d, which applies", self.cfg.SEED, self.seed)
            self.cfg = with_overrides(self.cfg, {"SEED": self.seed})
            restore_loss_normalizer(unwrapped(self.model), contents.get("loss_normalizers", []))
            self._is_unfinished = not contents.get("finished", True)
            logger.info("resuming %s at iteration %d", path, self.start_iter)
            if self.start_iter >= self.max_iter:
                level = logging.WARNING if self.start_iter > self.max_iter else logging.INFO
                done = f"already complete: {self.start_iter} iterations, and SOLVER.MAX_ITER is {self.max_iter}"
                logger.log(level, "%s: nothing is trained", done)
        if self.averaged is not None and not self.checkpointer.has_average:
            self.averaged.module.load_state_dict(unwrapped(self.model).state_dict())
            if path is not None:
                logger.warning("%s has no averaged weights: the average starts at iteration %d", path, self.start_iter)

    def train(self) -> OrderedDict | None:
        """Train until ``SOLVER.MAX_ITER``; returns as DefaultTrainer, or None after ``EARLY_STOPPING_PATIENCE``.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP save after the current iteration and end the process with 128 and the
        signal's number; a second Ctrl-C ends a single process at once.
        """
        is_single, notice = comm.get_world_size() == 1, ""
        if comm.is_main_process():
            notice = "The run saves a checkpoint after this iteration and stops."
            notice += " A second Ctrl-C stops it at once, without a checkpoint." * is_single
        with stop_requests(single_process=is_single, notice=notice) as self._trainer.received:
            try:
                # TorchScript computes differently once it has optimised a function, and a resumed run would differ.
                with torch.jit.optimized_execution(False):
                    return super().train()
            except hooks.StoppedEarly:
                return None
            except RuntimeError as error:
                if self._trainer.received:
                    # Another process received the signal before this one, and is gone.
                    terminate(self._trainer.received[0])
                if "DataLoader worker" not in str(error):
                    raise
                raise ConfigError(f"{one_line(error)} If memory is short, use fewer DATALOADER.NUM_WORKERS") from error
            finally:
                # torch ends workers only when nothing refers to their iterator, as a traceback may.
                if hasattr(self._trainer.data_loader, "stop"):
                    self._trainer.data_loader.stop()

    def stop_signal(self) -> int:
        """Return a signal after which all processes stop with this iteration, or 0."""
        step = self._trainer
        return max(step.received, default=0) if comm.get_world_size() == 1 else step.stop_signal

    def before_train(self) -> None:
        """Prepare the first iteration; a resumed run first does what the last one of its checkpoint may lack."""
        logging.getLogger(__name__).info("seed: %d", self.seed)
        if hasattr(self._trainer.data_loader, "start"):
            self._trainer.data_loader.start(seed=self.seed, iteration=self.start_iter)
        self._trainer.start(self.start_iter)
        if self._metrics_file is not None:
            self._metrics_file.start(self.start_iter - self._is_unfinished)
        super().before_train()
        if 0 < self.start_iter < self.max_iter:
            self.iter = self.storage.iter = self.start_iter - 1
            period = self.cfg.TEST.EVAL_PERIOD
            if self._is_unfinished and period and self.start_iter % period == 0:
                logging.getLogger(__name__).info(
                    f"evaluating iteration {self.iter} first: its checkpoint was saved before its evaluation, whose "
                    "results metrics.json, the best checkpoint and early stopping need"
                )
            for hook in self._after_saving:
                # A run that was stopped early does not continue.
                if self._is_unfinished or isinstance(hook, hooks.EarlyStopping):
                    hook.after_step()
            self.iter = self.storage.iter = self.start_iter

    def after_train(self) -> None:
        """Run the hooks; a run that failed is not evaluated."""
        # A resumed run may have had no iteration left.
        self.iter = min(self.iter, self.max_iter)
        if isinstance(sys.exc_info()[1], Exception):
            self.storage.iter = self.iter
            for hook in self._hooks:
                # A second error, as on a full disk, would replace the first.
                with contextlib.suppress(OSError):
                    if not isinstance(hook, EvalHook):
                        hook.after_train()
        else:
            super().after_train()

    def _evaluate(self) -> OrderedDict:
        """Evaluate the averaged model, or the model; a signal ends the run at once, with a checkpoint."""
        model = self.model
        if self.averaged is not None:
            model = self.averaged.module
            logging.getLogger(__name__).info("evaluating the EMA of %d steps (MODEL.EMA)", self.averaged.n_averaged)
        received = self._trainer.received
        # Before a signal reaches one process earlier than another.
        normalizers = hooks.loss_normalizers(self.model)
        try:
            with terminating_between_calls(model, received):
                self._last_eval_results = self.test(self.cfg, model)
        except (SystemExit, RuntimeError):
            # A RuntimeError where another process has ended first.
            if not received:
                raise
            message = "ended during the evaluation"
            if self.iter < self.max_iter and self._saving.last_saved != self.iter:
                self._saving.save(f"model_{self.iter:07d}", normalizers=normalizers)
                message = f"saved after iteration {self.iter}, {message}"
            name = signal.Signals(received[0]).name
            logging.getLogger(__name__).warning("%s: %s; continue with --resume", name, message)
            terminate(received[0])
        return self._last_eval_results

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST``, write ``OUTPUT_DIR/evaluation.json``, and draw a few images.

        That file has dataset -> task -> metric. With ``TEST.VALIDATION_LOSS`` the validation losses are a task of each
        dataset.
        """
        share_statistics(model)
        if cfg.TEST.AMP.ENABLED:
            logging.getLogger(__name__).info("evaluating with networks in bfloat16 (TEST.AMP)")
        with autocast_detector(torch.bfloat16 if cfg.TEST.AMP.ENABLED else torch.float32, unwrapped(model)):
            results = super().test(cfg, model, evaluators)
        for name in cfg.DATASETS.TEST if cfg.TEST.VALIDATION_LOSS else ():
            dataset_results = results if len(cfg.DATASETS.TEST) == 1 else results[name]
            dataset_results[LOSS_TASK] = validation_loss(cfg, unwrapped(model), name)
        report_results(cfg, results, model=fingerprint(cfg, unwrapped(model)) if comm.is_main_process() else None)
        return results


def amp_dtype(name: str, *, on_gpu: bool) -> torch.dtype:
    """Return the dtype of ``SOLVER.AMP.DTYPE``, and log which one "auto" is."""
    if name != "auto":
        return AMP_DTYPES[name]
    is_old = on_gpu and torch.cuda.get_device_capability() < (8, 0)
    name = "float16" if is_old else "bfloat16"
    logging.getLogger(__name__).info("mixed precision: SOLVER.AMP.DTYPE auto is %s", name)
    return AMP_DTYPES[name]


def report_results(cfg: CfgNode, results: OrderedDict, *, model: str | None = None) -> None:
    """In rank 0, write ``evaluation.json`` and draw ``TEST.NUM_VISUALIZED_IMAGES`` images.

    Args:
        cfg: names the datasets and the folder.
        results: what the evaluators return.
        model: fingerprint of the evaluated model.
    """
    if comm.is_main_process():
        write_results(cfg, results, model=model)
        # After the last iteration the storage's iteration is one higher.
        done = min(get_event_storage().iter + 1, cfg.SOLVER.MAX_ITER) if has_event_storage() else None
        draw_evaluation(cfg, name="evaluated" if done is None else f"{done:07d}")


def _write_evaluation(writers: Sequence[EventWriter], trainer: Trainer) -> None:
    """Write after each evaluation, so that none is missing between two lines; a writer writes an iteration once."""
    period = trainer.cfg.TEST.EVAL_PERIOD
    for writer in writers if period and (trainer.iter + 1) % period == 0 else ():
        writer.write()


def share_statistics(model: nn.Module) -> None:
    """Give all processes the running statistics of rank 0, which are saved; all processes call this."""
    if comm.get_world_size() > 1:
        for buffer in _statistics(model):
            torch.distributed.broadcast(buffer, src=0)


def _statistics(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that a forward pass changes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield from module.buffers(recurse=False)


def restore_loss_normalizer(model: nn.Module, saved: Sequence[float | None]) -> None:
    """Give this rank its loss normalizer, or the mean if the number of processes has changed."""
    values = [value for value in saved if value is not None]
    if values:
        same = len(values) == len(saved) == comm.get_world_size()
        model.loss_normalizer = values[comm.get_rank()] if same else sum(values) / len(values)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _on_device(value: Any, device: torch.device) -> Any:
    """Copy tensors to a GPU by pinned memory; detectron2's own copies, for which the host waits, are then none."""
    match value:
        case Tensor():
            return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value
        case Boxes() | BitMasks():
            return type(value)(_on_device(value.tensor, device))
        case Instances():
            fields = {name: _on_device(field, device) for name, field in value.get_fields().items()}
            return Instances(value.image_size, **fields)
    return value


def _not_finite(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value))


def _group_types(groups: Sequence[dict[str, Any]]) -> list[tuple[int, bool]]:
    """The number of parameters of each group, and whether the optimizer is like Adam."""
    return [(len(group["params"]), "betas" in group) for group in groups]


def _write_nonfinite(path: Path, *, before: int, new: Sequence[dict[str, Any]] = ()) -> None:
    """Keep the entries of a JSON list that are of earlier iterations, and add others; without any, no file."""
    old = read_json(path) if path.exists() else []
    entries = [*(entry for entry in old if entry["iteration"] < before), *new]
    if not entries:
        path.unlink(missing_ok=True)
    elif entries != old:
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(entries, indent=2) + "\n")
