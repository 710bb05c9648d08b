"""Train or evaluate in the processes of a run."""

import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng

from backbones.checkpoint_files import atomic_write
from backbones.errors import GENERATOR, check_replaceable, counted
from projects_vil import data
from projects_vil.checkpoint import Checkpointer, remove_run
from projects_vil.config import CONFIG_FILE, set_precision, with_overrides
from projects_vil.engine.auto_micro_batch import choose_micro_batches
from projects_vil.engine.checks import check_output_dir, check_setup
from projects_vil.engine.launch import Processes, launch
from projects_vil.engine.trainer import Trainer
from projects_vil.solver import resolve_schedule
from projects_vil.utils import LOCK_FILE, log_run, run_lock, stop_requests, terminating_between_calls


def launch_run(
    cfg: CfgNode,
    processes: Processes,
    *,
    eval_only: bool = False,
    resume: bool = False,
    overridden: Collection[str] = (),
) -> None:
    """Check a config, then train or evaluate in all processes. The check takes about a second.

    Args:
        cfg: Resolved config of the run, with an available device. Its ``OUTPUT_DIR`` exists.
        processes: Processes of the run.
        eval_only: Evaluate instead of training.
        resume: Continue from the last checkpoint in ``OUTPUT_DIR``.
        overridden: Config keys that the user set for this run.

    Raises:
        ConfigError: For a mistake in the config or in a file that it names. See also :func:`~.launch.launch`.
    """
    data.register_datasets(cfg)
    processes.check(cfg.MODEL.DEVICE)
    options = {"eval_only": eval_only, "resume": resume, "overridden": overridden}
    check_setup(cfg, processes=processes.world_size, **options)
    if eval_only:
        launch(run_evaluation, (cfg, Trainer, resume), processes, device=cfg.MODEL.DEVICE)
    else:
        launch(run_training, (cfg, Trainer, resume, tuple(overridden)), processes, device=cfg.MODEL.DEVICE)


def _set_up_run(cfg: CfgNode, *, eval_only: bool) -> None:
    """Log the environment, and set seeds, cuDNN and precision as detectron2's ``default_setup``."""
    logger = logging.getLogger("detectron2")
    logger.info("Rank of current process: %d. World size: %d", comm.get_rank(), comm.get_world_size())
    logger.info("Environment info:\n%s", collect_env_info())
    logger.info("Command line arguments: %s", sys.argv[1:])
    logger.info("Running with full config:\n%s", cfg.dump())
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + comm.get_rank())
    # In an evaluation, the images have too many different sizes for the cuDNN benchmark.
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not eval_only
    set_precision(cfg)


def save_config(cfg: CfgNode, trainer: type[Trainer]) -> None:
    """Write ``config.yaml`` in rank 0."""
    if comm.is_main_process():
        with atomic_write(Path(cfg.OUTPUT_DIR) / CONFIG_FILE) as partial:
            partial.write_text(f"# {GENERATOR}\n{trainer.dump_config(cfg)}")


def run_training(
    cfg: CfgNode, trainer_class: type[Trainer], resume: bool, overridden: Collection[str] = ()
) -> OrderedDict | None:
    """Train in one process. ``OUTPUT_DIR`` is locked against other runs by rank 0, and the other processes wait for it.

    Args:
        cfg: Config of the run.
        trainer_class: Trainer of the run. It is built from the config with the final schedule and seed.
        resume: Continue from the last checkpoint.
        overridden: Config keys that the user set for this run.

    Returns:
        The results of the best checkpoint, or of the last evaluation without ``TEST.BEST_METRIC``, or ``None``.

    Raises:
        ConfigError: If another run uses ``OUTPUT_DIR``, or if one finished there after this run started.
    """
    data.register_datasets(cfg)
    is_main, logger = comm.is_main_process(), logging.getLogger(__name__)
    with run_lock(cfg.OUTPUT_DIR) if is_main else contextlib.nullcontext():
        comm.synchronize()
        is_new = not check_output_dir(cfg, resume=resume)
        log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
        # The datasets are read before any file of an older run is deleted.
        num_images = trainer_class.read_datasets(cfg)
        cfg, lines = resolve_schedule(cfg, num_images, overridden)
        for line in lines:
            logger.info(line)
        if cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS == "auto":
            cfg = choose_micro_batches(cfg, resume=resume)
        comm.synchronize()
        # This key applies to this start only. A later start with this config.yaml must not delete the run.
        values: dict[str, object] = {"OVERWRITE_OUTPUT_DIR": False}
        if is_new and cfg.SEED < 0:
            # The seed determines the initial weights and is written to config.yaml.
            values["SEED"] = comm.shared_random_seed()
        if is_new and cfg.OVERWRITE_OUTPUT_DIR and is_main:
            remove_run(cfg.OUTPUT_DIR)
        cfg = with_overrides(cfg, values)
        _set_up_run(cfg, eval_only=False)
        solver = cfg.SOLVER
        if resume and is_new:
            weights = cfg.MODEL.WEIGHTS
            start = f"from '{weights}'" if weights else "with random weights (MODEL.WEIGHTS is empty)"
            logger.warning("%s has no checkpoint to --resume from. Training starts %s.", cfg.OUTPUT_DIR, start)
        if solver.WARMUP_ITERS >= solver.MAX_ITER:
            logger.warning("The learning rate never reaches BASE_LR: SOLVER.WARMUP_ITERS is not below MAX_ITER.")
        logger.info(
            f"training {cfg.MODEL.META_ARCHITECTURE} with {cfg.MODEL.TRANSFORMER.VARIANT} on {cfg.MODEL.DEVICE} in "
            f"{counted(comm.get_world_size(), 'process')}: {solver.MAX_ITER} iterations. The config, the model and the "
            f"environment are in {cfg.OUTPUT_DIR}/log.txt"
        )
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=resume)
        # The checkpoint of a resumed run is loaded first. If that fails, config.yaml is unchanged.
        save_config(trainer.cfg, trainer_class)
        return trainer.evaluate_best(trainer.train())


def run_evaluation(cfg: CfgNode, trainer: type[Trainer], resume: bool) -> None:
    """Evaluate a model in one process.

    Args:
        cfg: Config of the run.
        trainer: Builds and evaluates the model.
        resume: Evaluate the last checkpoint in ``OUTPUT_DIR`` instead of ``MODEL.WEIGHTS``.
    """
    data.register_datasets(cfg)
    log_run(cfg.OUTPUT_DIR, rank=comm.get_rank())
    trainer.read_datasets(cfg, train=False)
    _set_up_run(cfg, eval_only=True)
    folder = Path(cfg.OUTPUT_DIR)
    # A training run keeps its config.
    if not any(any(folder.glob(pattern)) for pattern in ("*.pth", "metrics.json", LOCK_FILE)):
        check_replaceable(folder / CONFIG_FILE, advice="Choose another OUTPUT_DIR.")
        save_config(cfg, trainer)
    model = trainer.build_model(cfg)
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, cfg=cfg, complete=True)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)
    is_single = comm.get_world_size() == 1
    with stop_requests(single_process=is_single) as received, terminating_between_calls(model, received):
        results = trainer.test(cfg, model)
    if comm.is_main_process():
        verify_results(cfg, results)
