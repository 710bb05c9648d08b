"""detectron2's default trainer with this project's optimizer, datasets, checkpoints and results file."""

import contextlib
import functools
import logging
import sys
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, TrainerBase
from detectron2.engine import hooks as detectron2_hooks
from detectron2.engine.hooks import EvalHook, PeriodicCheckpointer, PeriodicWriter
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    get_event_storage,
    has_event_storage,
)
from detectron2.utils.logger import setup_logger
from torch import nn
from torch.optim.swa_utils import AveragedModel

from backbones.attention.alternatives.performer import PerformerAttention
from backbones.utils.files import written_whole
from projects_vil import data, evaluation, solver
from projects_vil.checkpoint import Checkpointer, fingerprint
from projects_vil.config import CONFIG_FILE
from projects_vil.engine.hooks import (
    AverageWeights,
    KeepBest,
    LRScheduler,
    RandomShift,
    RedrawFeatures,
    SaveCheckpoints,
    SaveEvaluated,
    StopEarly,
    StoppedEarly,
    WriteMetrics,
    average_of,
    start_average,
)
from projects_vil.engine.processes import data_parallel, share_statistics
from projects_vil.engine.resuming import (
    ConfiguredRates,
    KeepMetrics,
    MetricsFile,
    SeedSteps,
    restore_loss_normalizer,
)
from projects_vil.engine.steps import AMP_DTYPES, Steps, unwrapped
from projects_vil.evaluation import LOSS_TASK, parts_of_metric, validation_loss, write_results
from projects_vil.progress import ProgressBar, ProgressPrinter, build_service_writers
from projects_vil.visualization import draw_evaluation


class Trainer(DefaultTrainer):
    """Trains, evaluates and resumes as :class:`DefaultTrainer` does; the differences are in the methods below."""

    # Whether the iteration of the checkpoint that was resumed from may lack its evaluation, and its line of metrics.
    _is_unfinished = False
    _metrics_file: MetricsFile | None = None
    # Of the weights, by MODEL.EMA.
    averaged: AveragedModel | None = None

    def __init__(self, cfg: CfgNode) -> None:
        # As DefaultTrainer's, but for its steps, and its DistributedDataParallel, which is for GPUs alone.
        TrainerBase.__init__(self)
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        self.cfg = cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        model = data_parallel(model, broadcast_buffers=False)
        solver, ema = cfg.SOLVER, cfg.MODEL.EMA
        self._trainer = Steps(
            model,
            loader,
            optimizer,
            output_dir=cfg.OUTPUT_DIR,
            accumulate=solver.ACCUMULATE,
            precision=AMP_DTYPES[solver.AMP.DTYPE] if solver.AMP.ENABLED else None,
            skip=solver.SKIP_DIVERGED,
        )
        if ema.ENABLED:
            self.averaged = average_of(unwrapped(model), decay=ema.DECAY)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(
            model, cfg.OUTPUT_DIR, cfg=cfg, averaged=self.averaged, trainer=weakref.proxy(self)
        )
        self.start_iter, self.max_iter = 0, cfg.SOLVER.MAX_ITER
        self.register_hooks(self.build_hooks())

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return solver.build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return solver.build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> torch.utils.data.DataLoader:
        return data.build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
        return data.build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        folder = Path(cfg.OUTPUT_DIR) / "inference"
        if len(cfg.DATASETS.TEST) > 1:
            folder /= dataset_name
        return evaluation.build_evaluator(cfg, dataset_name, str(folder))

    def build_hooks(self) -> list:
        solver, test = self.cfg.SOLVER, self.cfg.TEST
        hooks = [hook for hook in super().build_hooks() if not isinstance(hook, PeriodicCheckpointer)]
        hooks = [LRScheduler() if isinstance(hook, detectron2_hooks.LRScheduler) else hook for hook in hooks]
        period = self.cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD
        if any(isinstance(module, PerformerAttention) for module in self.model.modules()):
            hooks.insert(0, RedrawFeatures(period))
        if self.cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL:
            hooks.insert(0, RandomShift(self.model, self.cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_UNTIL))
        saving = SaveCheckpoints(self.checkpointer, period=solver.CHECKPOINT_PERIOD, keep=solver.CHECKPOINT_KEEP)
        evaluation = next(index for index, hook in enumerate(hooks) if isinstance(hook, EvalHook))
        averaging = [] if self.averaged is None else [AverageWeights(self.averaged, self._trainer)]
        hooks[evaluation] = EvalHook(test.EVAL_PERIOD, functools.partial(self._evaluate_unless_told_to_end, saving))
        writing = next((index for index, hook in enumerate(hooks) if isinstance(hook, PeriodicWriter)), None)
        if writing is not None:
            hooks[writing] = WriteMetrics(hooks[writing]._writers, evaluation_period=test.EVAL_PERIOD)
        self._saving = saving
        # All that an iteration does once its checkpoint is written.
        self._after_saving = [*hooks[evaluation:], SaveEvaluated(saving, period=test.EVAL_PERIOD)]
        if test.BEST_METRIC:
            _, task, _ = parts_of_metric(self.cfg)
            best = KeepBest(self.checkpointer, metric=test.BEST_METRIC, least=task == LOSS_TASK)
            self._after_saving.insert(1, best)
            if solver.EARLY_STOPPING_PATIENCE:
                patience = solver.EARLY_STOPPING_PATIENCE
                self._after_saving.append(StopEarly(best, saving, patience=patience, period=test.EVAL_PERIOD))
        # Another one where a run is resumed.
        self.seed = self.cfg.SEED if self.cfg.SEED >= 0 else comm.shared_random_seed()
        bar = [ProgressBar()] if comm.is_main_process() else []
        return [SeedSteps(), KeepMetrics(), *bar, *hooks[:evaluation], *averaging, saving, *self._after_saving]

    def resume_or_load(self, resume: bool = True) -> None:
        """As detectron2's; a resumed run goes on as if it had never stopped, to the bit on a CPU.

        The seed of the run, drawn where ``SEED`` is negative, is in the checkpoint; each iteration is seeded by it
        (:class:`~projects_vil.engine.resuming.SeedSteps`), and each image (:mod:`projects_vil.data.samplers`).
        """
        rates = ConfiguredRates(self.optimizer, self.scheduler)
        contents = self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        logger, path = logging.getLogger(__name__), self.checkpointer.resumed_from
        if path is not None:
            rates.restore()
            self.start_iter = self.iter + 1
            saved = contents.get("seed")
            if saved is None:
                logger.warning("%s has no seed, as older ones: the run goes on with other batches", path)
            elif self.cfg.SEED != saved:
                if self.cfg.SEED >= 0:
                    logger.warning("SEED is %d, and the resumed run has %d, which counts", self.cfg.SEED, saved)
                self._note_seed(saved)
            self.seed = self.seed if saved is None else saved
            restore_loss_normalizer(unwrapped(self.model), contents.get("loss_normalizers", []))
            self._is_unfinished = not contents.get("finished", True)
            logger.info("resuming %s at iteration %d", path, self.start_iter)
        if self.averaged is not None and not self.checkpointer.has_average:
            start_average(self.averaged, unwrapped(self.model))
            if path is not None:
                logger.warning("%s has no averaged weights: the average begins at iteration %d", path, self.start_iter)

    def _note_seed(self, seed: int) -> None:
        """Have the seed of the resumed run in its ``config.yaml`` again."""
        self.cfg = self.cfg.clone()
        self.cfg.defrost()
        self.cfg.SEED = seed
        self.cfg.freeze()
        path = Path(self.cfg.OUTPUT_DIR) / CONFIG_FILE
        if comm.is_main_process() and path.is_file():
            with written_whole(path) as partial:
                partial.write_text(self.cfg.dump())

    def build_writers(self) -> list[EventWriter]:
        """detectron2's; ``metrics.json`` has no iteration twice after a resume."""
        replaced = (CommonMetricPrinter, JSONWriter)
        writers = []
        for writer in super().build_writers():
            if isinstance(writer, replaced):
                writer.close()
            else:
                writers.append(writer)
        printer = ProgressPrinter(self.max_iter, batch_size=self.cfg.SOLVER.IMS_PER_BATCH)
        self._metrics_file = MetricsFile(Path(self.cfg.OUTPUT_DIR) / "metrics.json")
        return [printer, *writers, self._metrics_file, *build_service_writers(self.cfg)]

    def train(self) -> OrderedDict | None:
        """As detectron2's, with scripted losses that compute alike from the first call on.

        TorchScript runs a function differently in its first calls and once it has optimised it, and a resumed run would
        differ in the last digits. A run that ends early by ``SOLVER.EARLY_STOPPING_PATIENCE`` returns None.
        """
        try:
            with torch.jit.optimized_execution(False):
                return super().train()
        except StoppedEarly:
            return None
        except RuntimeError:
            if not self._saving.received:
                raise
            # Another process has heard of the signal before this one, and is gone.
            raise SystemExit(128 + self._saving.received) from None
        finally:
            self._trainer.data_loader.stop()

    def before_train(self) -> None:
        """Before the first iteration; a resumed run first does what the last one of its checkpoint may lack."""
        logging.getLogger(__name__).info("seed: %d", self.seed)
        self._trainer.data_loader.start(seed=self.seed, iteration=self.start_iter)
        self._trainer.forget_after(self.start_iter)
        if self._metrics_file is not None:
            self._metrics_file.start(self.start_iter - self._is_unfinished)
        super().before_train()
        if self._is_unfinished and self.start_iter < self.max_iter:
            self.iter = self.storage.iter = self.start_iter - 1
            for hook in self._after_saving:
                hook.after_step()
            self.iter = self.storage.iter = self.start_iter

    def after_train(self) -> None:
        """After the last iteration, also where a resumed run had none left; a run that failed is not evaluated."""
        self.iter = min(self.iter, self.max_iter)
        error = sys.exc_info()[1]
        if not isinstance(error, Exception) or isinstance(error, StoppedEarly):
            super().after_train()
            return
        self.storage.iter = self.iter
        for hook in self._hooks:
            if not isinstance(hook, EvalHook):
                # What has ended the run is to be said, not that its last lines cannot be written either.
                with contextlib.suppress(OSError):
                    hook.after_train()

    def _evaluate_unless_told_to_end(self, saving: SaveCheckpoints) -> OrderedDict:
        model = self.model
        if self.averaged is not None:
            model, steps = self.averaged.module, int(self.averaged.n_averaged)
            logging.getLogger(__name__).info("evaluating the averaged weights (MODEL.EMA), of %d steps", steps)
        with saving.ended_at_once(model):
            self._last_eval_results = self.test(self.cfg, model)
        return self._last_eval_results

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST``, write ``OUTPUT_DIR/evaluation.json``, and draw a few images.

        That file has dataset -> task -> metric; with ``TEST.LOSS`` a task of each dataset is its losses.
        """
        share_statistics(model)
        results = super().test(cfg, model, evaluators)
        for name in cfg.DATASETS.TEST if cfg.TEST.LOSS else ():
            of_dataset = results if len(cfg.DATASETS.TEST) == 1 else results[name]
            of_dataset[LOSS_TASK] = validation_loss(cfg, unwrapped(model), name)
        if comm.is_main_process():
            write_results(cfg, results, model=fingerprint(cfg, unwrapped(model)))
            # After the last iteration the storage is one further than after any other.
            done = min(get_event_storage().iter + 1, cfg.SOLVER.MAX_ITER) if has_event_storage() else None
            draw_evaluation(cfg, name="evaluated" if done is None else f"{done:07d}")
        return results
