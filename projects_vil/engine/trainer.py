"""The trainer of YAML configs and LazyConfigs, and its training step."""

import contextlib
import dataclasses
import json
import logging
import math
import signal
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, SimpleTrainer, TrainerBase, create_ddp_model
from detectron2.engine.hooks import CallbackHook, EvalHook, IterationTimer, PreciseBN
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, TensorboardXWriter, get_event_storage, has_event_storage
from detectron2.utils.logger import setup_logger
from fvcore.nn.precise_bn import get_bn_modules
from torch import Tensor, nn

from backbones import ConfigError
from backbones.attention.efficient import PerformerAttention
from backbones.errors import one_line
from backbones.files import write_text
from projects_vil import evaluation, solver
from projects_vil.checkpoint import BEST_CHECKPOINT, Checkpointer
from projects_vil.config import with_overrides
from projects_vil.data.build import build_test_loader, build_train_loader, derived_seed, seed_all
from projects_vil.data.records import read_datasets
from projects_vil.engine import hooks
from projects_vil.evaluation import LOSS_TASK, split_metric_name, validation_loss, write_results
from projects_vil.files import read_json
from projects_vil.modeling import MicroBatches, amp_dtype, autocast_detector, eval_dtype, use_sync_free_parts
from projects_vil.modeling.micro_batches import loss_normalizers, restore_loss_normalizer
from projects_vil.modeling.tiles import TiledDetector
from projects_vil.utils import stop_requests, terminating_between_calls

_logger = logging.getLogger(__name__)
# Keys of parameter groups that a resumed run takes from its config.
_RATES = {"initial_lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum"}
NONFINITE_FILE = "nonfinite.json"
# Limit of consecutive overflows under float16 loss scaling. From any scale, 32 halvings lead below 1.
MAX_OVERFLOWS = 32


@dataclasses.dataclass
class _Step:
    """The values of an iteration that the host needs when the device has finished it.

    Attributes:
        images: ``image_id`` and ``file_name`` of the images, by micro-batch.
        names: Names of the losses.
        weights, divisor: The loss of the batch is the weighted sum over micro-batches, divided by ``divisor``.
        error: Message of an exception in the forward pass of the last micro-batch.
    """

    iteration: int
    learning_rate: float
    data_time: float
    images: list[list[tuple[Any, Any]]] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)
    divisor: float = 1.0
    error: str = ""


class TrainStep(SimpleTrainer):
    """detectron2's training step with gradient accumulation, mixed precision and handling of non-finite losses.

    If a loss or the norm of the gradients is not finite, all processes skip the step: weights, optimizer state and
    BatchNorm statistics stay as they were. The images, losses and learning rate are written to ``nonfinite.json``.
    After more than ``max_nonfinite_steps`` such steps the run stops. Gradients that overflow under float16 loss
    scaling are not counted, because the scaler then lowers its scale.

    The host synchronizes with the device every ``sync_period`` iterations, in :meth:`flush`. In between, the device
    skips failed steps by itself: ``found_inf`` turns the step of a fused optimizer into a no-op. It also skips all
    steps after the limit is exceeded, until the host raises the error.

    Args:
        model: The detector, or a DistributedDataParallel around it.
        data_loader: Yields lists of images.
        optimizer: An optimizer with the hook of :func:`projects_vil.solver.clip_full_model`.
        output_dir: Folder of ``nonfinite.json``.
        accumulation_steps: Number of micro-batches per batch. See :class:`~projects_vil.modeling.MicroBatches`.
        precision: Dtype of autocast, or None. float16 adds loss scaling.
        max_nonfinite_steps: Number of steps that may be skipped before the run stops.
        sync_period: Iterations between two synchronizations. A value above 1 needs :func:`supports_deferred_sync`.

    Attributes:
        module: The detector, without DistributedDataParallel.
        has_stepped: 1 if the last step changed the weights, else 0; a tensor on the device.
        skipped: Number of skipped steps.
        overflows: Number of consecutive overflows.
        received: Signals that ask this process to stop.
        stop_signal: A signal that any process had received before the last synchronized backward pass, or 0.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Any,
        optimizer: torch.optim.Optimizer,
        *,
        output_dir: str | Path,
        accumulation_steps: int = 1,
        precision: torch.dtype | None = None,
        max_nonfinite_steps: int = 0,
        sync_period: int = 1,
    ) -> None:
        super().__init__(model, data_loader, optimizer)
        self.module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.nonfinite_file = Path(output_dir) / NONFINITE_FILE
        self.accumulation_steps = accumulation_steps
        self.precision = precision
        self.max_nonfinite_steps = max_nonfinite_steps
        self.sync_period = sync_period
        self._main_group = solver.main_group(optimizer)
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if precision == torch.float16 else None
        self.has_stepped = torch.zeros((), device=self.device)
        self.skipped = self.overflows = 0
        self.received: list[int] = []
        self.stop_signal = 0
        # Iterations that the host has not read: losses, norm and flags on the device, and the host's values.
        self._pending: list[tuple[Tensor, _Step]] = []
        # Number of skipped steps, on the device; None after a synchronization.
        self._num_skipped: Tensor | None = None

    def run_step(self) -> None:
        """Train on the next batch.

        Raises:
            ConfigError: In all processes, if a loss or gradient is not finite and no more steps may be skipped.
        """
        start = time.perf_counter()
        images = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        step = _Step(self.iter, self.optimizer.param_groups[self._main_group]["lr"], data_time)
        weighting = MicroBatches(self.module)
        statistics = [(buffer, buffer.clone()) for buffer in _running_statistics(self.module)]
        self.optimizer.zero_grad()
        losses, flags = self._backward(images, weighting, step)
        syncs_now = self.sync_period == 1 or bool(step.error)
        if syncs_now and flags[0] > 0:
            failed, norm = flags[0], torch.full_like(flags[0], math.nan)
        else:
            failed, norm = self._update(flags[0])
        if syncs_now and failed > 0:
            weighting.restore()
        for buffer, before in statistics:
            buffer.copy_(torch.where(failed > 0, before, buffer))
        self.has_stepped = 1 - failed.float()
        self._pending.append((torch.cat([*losses, torch.stack([norm.double(), failed.double(), *flags])]), step))
        if syncs_now or (self.iter + 1) % self.sync_period == 0:
            self.flush()

    def _backward(self, images: list[dict], weighting: MicroBatches, step: _Step) -> tuple[list[Tensor], Tensor]:
        """Compute the gradients of all micro-batches.

        Returns:
            The losses of each micro-batch, and two flags that all processes share: whether a loss is not finite, and a
            stop signal. If the host can read the first flag, it ends the iteration before the last backward pass.
        """
        size, is_distributed = len(images) // self.accumulation_steps, comm.get_world_size() > 1
        losses: list[Tensor] = []
        for index in range(self.accumulation_steps):
            micro_batch, is_last = images[index * size : (index + 1) * size], index == self.accumulation_steps - 1
            step.images.append([(image.get("image_id"), image.get("file_name")) for image in micro_batch])
            # detectron2 draws ground truth (VIS_PERIOD) from tensors on the host.
            if self.device.type == "cuda" and not getattr(self.module, "vis_period", 0):
                micro_batch = [{key: _to_gpu(x, self.device) for key, x in image.items()} for image in micro_batch]
            with contextlib.nullcontext() if is_last or not is_distributed else self.model.no_sync():
                try:
                    with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                        terms = self.model(micro_batch)
                except (AssertionError, FloatingPointError) as error:
                    # detectron2 raises them for non-finite boxes in its GIoU loss, and for non-finite proposals.
                    is_box = str(error).startswith("bad box")
                    if isinstance(error, AssertionError) and not is_box:
                        raise
                    text = one_line(error).removesuffix(". Training has diverged")
                    step.error = "Predicted boxes contain NaN" if is_box else text
                    terms = {"total_loss": torch.full((), math.nan, device=self.device)}
                step.names = list(terms)
                losses = [] if step.error else losses
                losses.append(torch.stack([value.detach().double() for value in terms.values()]))
                if is_last or step.error:
                    # Once per iteration in all processes, before the backward pass in which they wait for each other.
                    is_nonfinite = (~torch.cat(losses).isfinite()).any().double()
                    # Filled on the device, because copying a value to it would synchronize.
                    flags = torch.stack([is_nonfinite, torch.full_like(is_nonfinite, max(self.received, default=0))])
                    if is_distributed:
                        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
                    if step.error or (self.sync_period == 1 and flags[0] > 0):
                        return losses, flags
                weight = weighting.weight(size)
                step.weights.append(weight)
                if index == 0:
                    # An estimate: the exact divisor follows from the last micro-batch.
                    step.divisor = weight * self.accumulation_steps
                if is_last and step.divisor != (exact := weighting.divisor()):
                    gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
                    torch._foreach_mul_([grad for grad in gradients if grad is not None], step.divisor / exact)
                    step.divisor = exact
                total = sum(terms.values()) * (weight / step.divisor)
                (total if self.scaler is None else self.scaler.scale(total)).backward()
        self.after_backward()
        return losses, flags

    def _update(self, is_nonfinite: Tensor) -> tuple[Tensor, Tensor]:
        """Take the optimizer's step, unless it fails.

        Returns:
            Whether it failed, 1 or 0, and the gradient norm (NaN for an optimizer without clip_full_model).
        """
        optimizer, scaler = self.optimizer, self.scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.sync_period > 1:
            if self._num_skipped is None:
                skipped = min(self.skipped, self.max_nonfinite_steps)
                self._num_skipped = torch.full_like(is_nonfinite, skipped)
            is_over = self._num_skipped > self.max_nonfinite_steps
            # The hook of clip_full_model sets found_inf for a gradient norm that is not finite.
            optimizer.grad_scale, optimizer.found_inf = None, torch.maximum(is_nonfinite, is_over.double()).float()
        failed = torch.zeros_like(is_nonfinite)
        try:
            optimizer.step()
            failed = getattr(optimizer, "found_inf", failed)
        except FloatingPointError:
            failed = torch.ones_like(is_nonfinite)
        finally:
            norm = getattr(optimizer, "gradient_norm", torch.full_like(is_nonfinite, math.nan))
            for name in ("grad_scale", "found_inf", "gradient_norm"):
                vars(optimizer).pop(name, None)
        if scaler is not None:
            one = torch.ones((), device=self.device)
            before = scaler.scale(one)
            scaler.update()
            # Only overflows lower the scale, not losses that are not finite.
            scaler.update(torch.where(is_nonfinite > 0, before, scaler.scale(one)))
        if self._num_skipped is not None:
            self._num_skipped = self._num_skipped + (failed if scaler is None else is_nonfinite)
        return failed, norm

    def flush(self) -> None:
        """Wait for the device, then write metrics and report skipped steps for the iterations since the last call.

        All processes call this after the same iteration.

        Raises:
            ConfigError: See :meth:`run_step`.
        """
        pending, self._pending, self._num_skipped = self._pending, [], None
        rows = torch.cat([row for row, _ in pending]).cpu().split([len(row) for row, _ in pending]) if pending else ()
        for row, (_, step) in zip(rows, pending, strict=True):
            # (micro-batches, names)
            losses = row[:-4].view(-1, len(step.names))
            norm, has_failed, is_nonfinite, stop_signal = row[-4:].tolist()
            self.stop_signal = int(stop_signal)
            if has_failed and (is_nonfinite or self.scaler is None):
                self._skip(step, losses, f"the gradient norm is {norm}")
                continue
            self.overflows = self.overflows + 1 if has_failed else 0
            if self.overflows >= MAX_OVERFLOWS:
                self._skip(step, losses, f"the gradients overflowed in {self.overflows} consecutive steps")
                continue
            weights = losses.new_tensor(step.weights)[:, None] / step.divisor
            means = dict(zip(step.names, (losses * weights).sum(0), strict=True))
            self.write_metrics(means, step.data_time, step.iteration)
            if math.isfinite(norm):
                get_event_storage().put_scalar("gradient_norm", norm, cur_iter=step.iteration)

    def _skip(self, step: _Step, losses: Tensor, reason: str) -> None:
        """Report a skipped step in all processes, and raise an error if it was one too many.

        Args:
            losses: (micro-batches, names).
            reason: The reason if all losses are finite.
        """
        self.skipped += 1
        is_skipped = self.skipped <= self.max_nonfinite_steps
        own, images, values = step.error, sum(step.images, []), losses[-1].tolist()
        for index in (~losses.isfinite()).any(1).nonzero()[:1].flatten().tolist():
            images, values = step.images[-1 if step.error else index], losses[index].tolist()
            terms = zip(step.names, values, strict=True)
            own = own or ", ".join(f"{name} is {value}" for name, value in terms if not math.isfinite(value))
        # JSON has no NaN.
        values = [value if math.isfinite(value) else str(value) for value in values]
        images = [{"image_id": image_id, "file_name": file_name} for image_id, file_name in images]
        process = {"losses": dict(zip(step.names, values, strict=True)), "images": images}
        reasons, processes = zip(*comm.all_gather((own, process)), strict=True)
        reason = next(filter(None, reasons), reason)
        if comm.is_main_process():
            entry = {"iteration": step.iteration, "reason": reason, "learning_rate": step.learning_rate}
            self.write_nonfinite(step.iteration, entry | {"is_skipped": is_skipped, "processes": processes})
        # The first process that raises ends the others.
        comm.synchronize()
        message = (
            f"The step of iteration {step.iteration} is not finite: {reason} (learning rate {step.learning_rate:g}). "
            f"Its images and losses are in {self.nonfinite_file}."
        )
        if not is_skipped:
            skip = f"skip such steps with SOLVER.MAX_NONFINITE_STEPS {max(2 * self.max_nonfinite_steps, 10)}"
            advice = f"Resume (--resume) with a lower SOLVER.BASE_LR, or {skip}."
            raise ConfigError(f"{message} No weight has changed. {advice}")
        _logger.warning(f"{message} Skipped {self.skipped} of {self.max_nonfinite_steps} (SOLVER.MAX_NONFINITE_STEPS).")

    def write_nonfinite(self, iteration: int, *new: dict[str, Any]) -> None:
        """Write ``nonfinite.json``: its entries before an iteration, and new ones. An empty file is deleted."""
        old = read_json(self.nonfinite_file) if self.nonfinite_file.exists() else []
        if entries := [*(entry for entry in old if entry["iteration"] < iteration), *new]:
            write_text(self.nonfinite_file, json.dumps(entries, indent=2) + "\n")
        else:
            self.nonfinite_file.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"skipped": self.skipped, "overflows": self.overflows}
        return state if self.scaler is None else state | {"grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint. Learning rate, weight decay and momentum stay as in the config.

        Raises:
            ConfigError: If the checkpoint has no optimizer state, or other parameter groups.
        """
        own, saved = self.optimizer.state_dict()["param_groups"], state_dict.get("optimizer")
        if saved is None or _group_types(saved["param_groups"]) != _group_types(own):
            advice = "Resume with its config.yaml, or start from its weights (MODEL.WEIGHTS) in another OUTPUT_DIR."
            keys = "SOLVER.OPTIMIZER, LR_MULTIPLIERS or FREEZE_AT"
            raise ConfigError(f"The optimizer state of the checkpoint does not fit {keys}. {advice}")
        pairs = list(zip(saved["param_groups"], own, strict=True))
        changed = [name for key, name in _RATES.items() if any(old.get(key) != new.get(key) for old, new in pairs)]
        if changed:
            _logger.warning("The config changes the %s of the resumed run.", ", ".join(changed))
        super().load_state_dict(state_dict | {"optimizer": saved | {"param_groups": own}})
        self.skipped, self.overflows = state_dict.get("skipped", 0), state_dict.get("overflows", 0)
        if self.scaler is not None and "grad_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["grad_scaler"])


def supports_deferred_sync(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the host may synchronize with the device less than once per iteration.

    This needs a fused optimizer on a GPU, and an iteration that no process leaves alone: detectron2 raises an error
    for non-finite proposals, or boxes of a GIoU loss, in one process while the others wait for its gradients.
    """
    is_cuda = next(model.parameters()).device.type == "cuda"
    has_iou_loss = getattr(model, "box_reg_loss_type", "smooth_l1") != "smooth_l1"
    can_raise = comm.get_world_size() > 1 and (has_iou_loss or hasattr(model, "proposal_generator"))
    return is_cuda and not can_raise and getattr(optimizer, "_step_supports_amp_scaling", False)


class StoppedEarly(BaseException):
    """Ends the training loop from within a hook. It is not an error."""


class Trainer(DefaultTrainer):
    """Train, evaluate and resume a detector, as detectron2's DefaultTrainer.

    On the CPU a resumed run is identical to an uninterrupted run, bit by bit. Each iteration is seeded by the seed of
    the run, the iteration and the rank, and so is each image (:mod:`projects_vil.data.build`).

    Args:
        cfg: All options of the run. ``SOLVER.GRADIENT_ACCUMULATION_STEPS`` must be a number: ``"auto"`` is resolved by
            :func:`~projects_vil.engine.auto_micro_batch.choose_micro_batches`. A subclass may override how the model,
            optimizer, loader and schedule are built, as :func:`projects_vil.engine.lazy.lazy_trainer` does. An exact
            resume needs a loader such as :class:`projects_vil.data.build.Loader`.

    Attributes:
        log_period: Iterations between two lines of the log and of ``metrics.json``.
        seed: The seed of the run.
        averaged: The moving average of the weights (``MODEL.EMA``), which is evaluated; None if it is disabled.
    """

    log_period = 20
    averaged: hooks.ExponentialAverage | None = None
    read_datasets = staticmethod(read_datasets)
    build_optimizer = staticmethod(solver.build_optimizer)
    build_lr_scheduler = staticmethod(solver.build_lr_scheduler)
    build_train_loader = staticmethod(build_train_loader)
    build_test_loader = staticmethod(build_test_loader)
    build_evaluator = staticmethod(evaluation.build_evaluator)
    dump_config = staticmethod(CfgNode.dump)

    def __init__(self, cfg: CfgNode) -> None:
        # DefaultTrainer's would build its own step, and DistributedDataParallel only on GPUs.
        TrainerBase.__init__(self)
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        self.cfg = cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        options, on_gpu = cfg.SOLVER, cfg.MODEL.DEVICE.startswith("cuda")
        if on_gpu:
            use_sync_free_parts(model)
        device_ids = [comm.get_local_rank()] if on_gpu else None
        self._trainer = TrainStep(
            create_ddp_model(model, broadcast_buffers=False, device_ids=device_ids, gradient_as_bucket_view=True),
            self.build_train_loader(cfg),
            optimizer,
            output_dir=cfg.OUTPUT_DIR,
            accumulation_steps=options.GRADIENT_ACCUMULATION_STEPS,
            precision=amp_dtype(cfg) if options.AMP.ENABLED else None,
            max_nonfinite_steps=options.MAX_NONFINITE_STEPS,
            sync_period=self.log_period if supports_deferred_sync(model, optimizer) else 1,
        )
        if cfg.MODEL.EMA.ENABLED:
            self.averaged = hooks.ExponentialAverage(model, decay=cfg.MODEL.EMA.DECAY)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(
            self.model, cfg.OUTPUT_DIR, cfg=cfg, averaged=self.averaged, trainer=weakref.proxy(self)
        )
        self.start_iter, self.max_iter = 0, options.MAX_ITER
        self.seed = cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed()
        # In rank 0, with TEST.BEST_METRIC.
        self._best: hooks.BestCheckpointer | None = None
        # Whether the last iteration of the resumed checkpoint may lack its evaluation and metrics.
        self._is_unfinished = False
        self.register_hooks(self.build_hooks())

    def build_hooks(self) -> list[HookBase]:
        """Build the hooks in the order of an iteration: schedules, checkpoint, evaluation, metrics."""
        options, test, transformer = self.cfg.SOLVER, self.cfg.TEST, self.cfg.MODEL.TRANSFORMER
        model, is_main, eval_period = self._trainer.module, comm.is_main_process(), test.EVAL_PERIOD
        before: list[HookBase] = [hooks.MetricsHistory()]
        if transformer.RANDOM_SHIFT_FRACTION:
            before.append(CallbackHook(before_step=hooks.sample_random_shifts))
        if any(isinstance(module, PerformerAttention) for module in model.modules()):
            before.append(hooks.RedrawFeatures())
        before += [IterationTimer(), hooks.LRScheduler(scheduler=self.scheduler)]
        if test.PRECISE_BN.ENABLED and get_bn_modules(model):
            loader = self.build_train_loader(self.cfg)
            before.append(PreciseBN(eval_period, self.model, loader, test.PRECISE_BN.NUM_ITER))
        if self.averaged is not None:
            average, step = self.averaged, self._trainer
            before.append(CallbackHook(after_step=lambda _: average.update_parameters(model, step.has_stepped)))
        if is_main and sys.stdout.isatty():
            before.append(hooks.ProgressBar(len(getattr(self._trainer.data_loader, "dataset", ()))))
        self._saving = hooks.PeriodicCheckpointer()
        after: list[HookBase] = [EvalHook(eval_period, self._evaluate)]
        if test.BEST_METRIC and self.cfg.DATASETS.TEST and is_main:
            dataset, metric = split_metric_name(self.cfg)
            mode = "min" if metric.startswith(LOSS_TASK) else "max"
            metric = f"{dataset}/{metric}" if len(self.cfg.DATASETS.TEST) > 1 else metric
            self._best = hooks.BestCheckpointer(eval_period, self.checkpointer, metric, mode)
            after.append(self._best)
        if is_main:
            after.append(hooks.PeriodicWriter((), self.log_period))
        after.append(CallbackHook(after_step=self._saving.save_evaluated))
        if options.EARLY_STOPPING_PATIENCE:
            after.append(CallbackHook(after_step=Trainer._stop_early))
        # A resumed run may have to repeat these for the iteration of its checkpoint.
        self._after_saving = after
        return [*before, self._saving, *after]

    def run_step(self) -> None:
        """Train on a batch, and wait for the device if metrics, a checkpoint or an evaluation follow."""
        # Stochastic depth, sampled proposals and other random numbers then need no state in the checkpoint.
        seed_all(derived_seed("iteration", self.seed, self.iter, comm.get_rank()))
        super().run_step()
        done = self.iter + 1
        periods = (self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD)
        is_edge = self.iter == self.start_iter or done >= self.max_iter
        if is_edge or any(period and done % period == 0 for period in periods):
            self._trainer.flush()

    def state_dict(self) -> dict[str, Any]:
        # A signal may save any iteration. The hooks need the metrics of all of them.
        self._trainer.flush()
        return super().state_dict()

    def build_writers(self) -> list[EventWriter]:
        """Return the writers of detectron2 (log, TensorBoard, ``metrics.json``) and of the services in ``LOGGING``."""
        # The resumed checkpoint may have been saved before the metrics of its iteration.
        first = self.start_iter - self._is_unfinished
        return [
            hooks.MetricPrinter(self.max_iter, batch_size=self.cfg.SOLVER.IMS_PER_BATCH),
            TensorboardXWriter(self.cfg.OUTPUT_DIR),
            hooks.MetricsFile(Path(self.cfg.OUTPUT_DIR) / "metrics.json", first_iteration=first),
            *(build(self.cfg) for key, (_, build) in hooks.SERVICES.items() if self.cfg.LOGGING[key]),
        ]

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from the last checkpoint in ``OUTPUT_DIR``, or load ``MODEL.WEIGHTS``.

        A resumed run keeps the seed of its checkpoint.
        """
        contents = self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        path, model = self.checkpointer.resumed_from, self._trainer.module
        if path is not None:
            self.start_iter = self.iter + 1
            self.seed = contents.get("seed", self.seed)
            if self.cfg.SEED not in (-1, self.seed):
                _logger.warning("SEED %d is not used: the run continues with %d.", self.cfg.SEED, self.seed)
            self.cfg = with_overrides(self.cfg, {"SEED": self.seed})
            restore_loss_normalizer(model, contents.get("loss_normalizers", []))
            self._is_unfinished = not contents.get("finished", True)
            _logger.info("Resuming %s at iteration %d", path, self.start_iter)
            if self.start_iter >= self.max_iter:
                _logger.warning("The run has all %d iterations: nothing is trained. Raise --epochs.", self.start_iter)
        if self.averaged is not None and not self.checkpointer.has_average:
            self.averaged.module.load_state_dict(model.state_dict())
            if path is not None:
                _logger.warning("%s has no averaged weights: averaging starts at iteration %d.", path, self.start_iter)

    def train(self) -> OrderedDict | None:
        """Train until ``SOLVER.MAX_ITER``, and return the last evaluation. Return None after early stopping.

        SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU save a checkpoint after the current iteration and exit
        with 128 plus the number of the signal. A second Ctrl-C ends a single process at once.
        """
        is_single, notice = comm.get_world_size() == 1, ""
        if comm.is_main_process():
            notice = "The run saves a checkpoint after this iteration and stops."
            notice += " Press Ctrl-C twice to stop it at once, without a checkpoint." * is_single
        with stop_requests(single_process=is_single, notice=notice) as self._trainer.received:
            try:
                # An optimized TorchScript function computes other last digits, so that a resumed run would differ.
                with torch.jit.optimized_execution(False):
                    return super().train()
            except StoppedEarly:
                return None
            except RuntimeError:
                if self._trainer.received:
                    # Another process received the signal first and has ended.
                    raise SystemExit(128 + self._trainer.received[0]) from None
                raise
            finally:
                # A traceback may keep the iterator alive, and with it the workers.
                if hasattr(self._trainer._data_loader_iter_obj, "close"):
                    self._trainer._data_loader_iter_obj.close()

    def evaluate_best(self) -> None:
        """Evaluate ``model_best.pth`` after training, unless the last evaluation was the best.

        ``evaluation.json`` and the predictions then belong to the checkpoint that ``Detector.load`` loads.
        """
        best = self._best
        waited, iteration = comm.all_gather((best.evaluations_since_best, best.best_iter) if best else (0, None))[0]
        if not waited or iteration is None:
            return
        _logger.info("Evaluating the best checkpoint, of iteration %d", iteration)
        model = self._trainer.module if self.averaged is None else self.averaged.module
        best_checkpoint = Path(self.cfg.OUTPUT_DIR) / BEST_CHECKPOINT
        Checkpointer(model, cfg=self.cfg, complete=True).load(str(best_checkpoint), checkpointables=[])
        self.test(self.cfg, model)

    def _stop_early(self) -> None:
        """Stop after ``SOLVER.EARLY_STOPPING_PATIENCE`` evaluations without a better metric, and save the model.

        Raises:
            StoppedEarly: In all processes.
        """
        if (self.iter + 1) % self.cfg.TEST.EVAL_PERIOD or self.iter + 1 >= self.max_iter:
            return
        waited = comm.all_gather(self._best and self._best.evaluations_since_best)[0]
        if waited >= self.cfg.SOLVER.EARLY_STOPPING_PATIENCE:
            self._saving.save("model_final", finished=True)
            _logger.info(
                f"Stopped early after iteration {self.iter}: the last {waited} evaluations did not improve "
                f"{self.cfg.TEST.BEST_METRIC}. To continue, raise SOLVER.EARLY_STOPPING_PATIENCE and use --resume."
            )
            raise StoppedEarly

    def stop_signal(self) -> int:
        """Return the signal after which all processes stop with this iteration, or 0."""
        step = self._trainer
        return max(step.received, default=0) if comm.get_world_size() == 1 else step.stop_signal

    def before_train(self) -> None:
        """Prepare the first iteration. A resumed run first repeats what the iteration of its checkpoint may lack."""
        _logger.info("seed: %d", self.seed)
        if hasattr(self._trainer.data_loader, "start"):
            self._trainer.data_loader.start(seed=self.seed, iteration=self.start_iter)
        if comm.is_main_process():
            # Incomplete files of processes that were killed while writing
            for path in Path(self.cfg.OUTPUT_DIR).glob(".*.partial"):
                path.unlink(missing_ok=True)
            if self._trainer.nonfinite_file.exists():
                # Without the entries of another run, and of iterations that a resumed run repeats.
                self._trainer.write_nonfinite(self.start_iter)
        super().before_train()
        if 0 < self.start_iter < self.max_iter:
            self.iter = self.storage.iter = self.start_iter - 1
            period, is_final = self.cfg.TEST.EVAL_PERIOD, Path(self.checkpointer.resumed_from).stem == "model_final"
            is_due = self._is_unfinished and bool(period) and (self.start_iter % period == 0 or is_final)
            if is_due:
                _logger.info(f"Evaluating iteration {self.iter} first: its checkpoint was saved before its evaluation.")
            for hook in self._after_saving if self._is_unfinished else ():
                # After the last iteration of a run, the period of a longer run may differ.
                if is_due and isinstance(hook, EvalHook):
                    hook._do_eval()
                elif is_due and isinstance(hook, hooks.BestCheckpointer):
                    hook._best_checking()
                else:
                    hook.after_step()
            if self.cfg.SOLVER.EARLY_STOPPING_PATIENCE:
                # A run that was stopped early does not continue.
                self._stop_early()
            self.iter = self.storage.iter = self.start_iter

    def after_train(self) -> None:
        """Run the hooks. A run that fails in its last iteration is not evaluated."""
        # A resumed run may have had no iteration left.
        self.iter = min(self.iter, self.max_iter)
        if isinstance(sys.exc_info()[1], Exception):
            self._hooks = [hook for hook in self._hooks if not isinstance(hook, EvalHook)]
        super().after_train()

    def _evaluate(self) -> OrderedDict:
        """Evaluate the averaged model, or the model. A signal saves a checkpoint and ends the run at once."""
        model = self._trainer.module
        if self.averaged is not None:
            model = self.averaged.module
            _logger.info("Evaluating the EMA of %d steps (MODEL.EMA)", self.averaged.n_averaged)
        received = self._trainer.received
        # Gathered before a signal reaches one process earlier than another.
        normalizers = loss_normalizers(self._trainer.module)
        try:
            with terminating_between_calls(model, received):
                self._last_eval_results = self.test(self.cfg, model)
        except (SystemExit, RuntimeError):
            # If another process has ended first, torch raises a RuntimeError.
            if not received:
                raise
            message = "the evaluation was interrupted"
            if self.iter < self.max_iter and self._saving.last_saved != self.iter:
                self._saving.save(f"model_{self.iter:07d}", normalizers=normalizers)
                message = f"saved after iteration {self.iter}; {message}"
            name = signal.Signals(received[0]).name
            _logger.warning("%s: %s; continue with --resume", name, message)
            raise SystemExit(128 + received[0]) from None
        return self._last_eval_results

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST``, write ``OUTPUT_DIR/evaluation.json``, and draw a few images.

        The file maps dataset -> task -> metric. ``TEST.VALIDATION_LOSS`` adds a task with the validation losses.

        Args:
            cfg: The config of the model.
            model: The model, also in a DistributedDataParallel.
            evaluators: See detectron2's method.
        """
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        share_statistics(model)
        dtype = eval_dtype(cfg)
        if dtype != torch.float32:
            _logger.info("Evaluating in %s (INFERENCE.DTYPE)", str(dtype)[6:])
        with autocast_detector(dtype, model):
            results = super().test(cfg, TiledDetector(cfg, model) if cfg.TEST.TILE_SIZE else model, evaluators)
        for name in cfg.DATASETS.TEST if cfg.TEST.VALIDATION_LOSS else ():
            dataset_results = results if len(cfg.DATASETS.TEST) == 1 else results[name]
            dataset_results[LOSS_TASK] = validation_loss(cfg, model, name)
        if comm.is_main_process():
            # Imports Matplotlib, which takes a tenth of the start of a run.
            from projects_vil.visualization.predictions import draw_evaluation

            write_results(cfg, results)
            # After the last iteration the storage's iteration is one higher.
            done = min(get_event_storage().iter + 1, cfg.SOLVER.MAX_ITER) if has_event_storage() else None
            draw_evaluation(cfg, name="evaluated" if done is None else f"{done:07d}")
        return results


def share_statistics(model: nn.Module) -> None:
    """Copy the running statistics of rank 0, which are saved, to all processes; all processes call this."""
    if comm.get_world_size() > 1:
        for buffer in _running_statistics(model):
            torch.distributed.broadcast(buffer, src=0)


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that a forward pass changes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield from module.buffers(recurse=False)


def _to_gpu(value: Any, device: torch.device) -> Any:
    """Copy tensors to a GPU through pinned memory, so that the host does not wait for detectron2's own copies."""
    match value:
        case Tensor():
            return value.pin_memory().to(device, non_blocking=True)
        case Boxes() | BitMasks():
            return type(value)(_to_gpu(value.tensor, device))
        case Instances():
            fields = {name: _to_gpu(field, device) for name, field in value.get_fields().items()}
            return Instances(value.image_size, **fields)
    return value


def _group_types(groups: Sequence[dict[str, Any]]) -> list[tuple[int, bool]]:
    """Return the number of parameters of each group, and whether the optimizer is like Adam."""
    return [(len(group["params"]), "betas" in group) for group in groups]
