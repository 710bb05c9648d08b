"""A schedule by the size of the data: ``SOLVER.EPOCHS`` into iterations."""

import math
import shlex
from collections.abc import Sequence

from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.data import load_dataset

_EPOCHS, _MAX_ITER = "SOLVER.EPOCHS", "SOLVER.MAX_ITER"
_WARMUP_SHARE = 0.05
# An epoch as long as this is worth an evaluation; shorter ones wait for each other.
_LONG_EPOCH = 1000
_SHORTEST_PERIOD = 100
_MOST_PERIODS = 20


def count_training_images(cfg: CfgNode) -> int:
    """How many images of ``DATASETS.TRAIN`` are trained on: without those that have no annotation, where
    ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` drops them.

    Nothing of the check is logged but its errors, which stop: a run's own reading says it, into its log.txt.

    Raises:
        InputError: as :func:`projects_vil.data.load_dataset`.
    """
    return len(load_dataset(cfg, cfg.DATASETS.TRAIN, train=True, report=False))


def is_by_epochs(cfg: CfgNode, overrides: Sequence[str] = ()) -> bool:
    """Whether ``SOLVER.EPOCHS`` says how long to train.

    What is typed counts over what a file says: a ``SOLVER.MAX_ITER`` among the overrides over the file's epochs.

    Args:
        overrides: those that ``cfg`` was loaded with, keys and values by turns.

    Raises:
        InputError: for a negative number, or where both are typed.
    """
    epochs, iterations, typed = cfg.SOLVER.EPOCHS, cfg.SOLVER.MAX_ITER, set(overrides[::2])
    if epochs < 0:
        raise InputError(f"{_EPOCHS} is {epochs}: it is 1 or more, or 0 for {_MAX_ITER} as it is")
    if epochs and {_EPOCHS, _MAX_ITER} <= typed:
        raise InputError(f"{_EPOCHS} {epochs} and {_MAX_ITER} {iterations} both say how long to train: type one")
    return epochs > 0 and _MAX_ITER not in typed


def schedule_by_epochs(cfg: CfgNode, num_images: int, overrides: Sequence[str] = ()) -> tuple[CfgNode, list[str]]:
    """A config whose iterations are those of ``SOLVER.EPOCHS``, and what was done, in words.

    An epoch is ``num_images / SOLVER.IMS_PER_BATCH`` iterations, and a number that is no whole one is rounded up.

    - ``SOLVER.MAX_ITER`` is all epochs.
    - ``SOLVER.STEPS`` keep their fractions of ``MAX_ITER``, so that a 1x schedule stays one; a schedule without steps
      (cosine, polynomial) has its shape anyway, and its ``STEPS`` stay.
    - ``SOLVER.WARMUP_ITERS`` stay, but are no more than 5 % of ``MAX_ITER``.
    - ``TEST.EVAL_PERIOD`` and ``SOLVER.CHECKPOINT_PERIOD`` are an epoch of 1000 iterations or more; of shorter epochs
      as many as make 100 iterations, and a twentieth of the run, at least.

    Each of these but ``MAX_ITER`` stays as it was typed, where it was. ``SOLVER.EPOCHS`` is 0 in what is returned, so
    that a run that goes on with it, or is evaluated, has the same iterations. ``BASE_LR`` stays.

    Args:
        num_images: of an epoch, as :func:`count_training_images` has them.
        overrides: those that ``cfg`` was loaded with, keys and values by turns.

    Raises:
        InputError: as :func:`is_by_epochs`, or for no images.
    """
    solver, typed = cfg.SOLVER, overrides[::2]
    if not is_by_epochs(cfg, overrides):
        unused = f"{_MAX_ITER} {solver.MAX_ITER} was typed and counts; {_EPOCHS} {solver.EPOCHS} of the config does not"
        return _merged(cfg, {_EPOCHS: 0}), [unused] if solver.EPOCHS else []
    if num_images < 1 or solver.IMS_PER_BATCH < 1:
        raise InputError(f"{num_images} images, {solver.IMS_PER_BATCH} an iteration: both are 1 or more")
    epochs, epoch = solver.EPOCHS, num_images / solver.IMS_PER_BATCH
    iterations = math.ceil(epochs * epoch)
    short = max(math.ceil(_SHORTEST_PERIOD / epoch), math.ceil(epochs / _MOST_PERIODS))
    period = min(math.ceil(epoch * (1 if epoch >= _LONG_EPOCH else short)), iterations)
    values = {
        _MAX_ITER: iterations,
        "SOLVER.STEPS": _scaled_steps(cfg, iterations),
        "SOLVER.WARMUP_ITERS": min(solver.WARMUP_ITERS, math.ceil(_WARMUP_SHARE * iterations)),
        "TEST.EVAL_PERIOD": period,
        "SOLVER.CHECKPOINT_PERIOD": period,
    }
    values = {key: value for key, value in values.items() if key not in typed}
    keys = " ".join(f"{key} {shlex.quote(str(value))}" for key, value in values.items())
    lines = [
        f"{_EPOCHS} {epochs}: {num_images} training images, {solver.IMS_PER_BATCH} an iteration, "
        f"{epoch:.4g} iterations an epoch",
        f"{_EPOCHS} {epochs} is {keys}",
    ]
    return _merged(cfg, values | {_EPOCHS: 0}), lines


def scale_learning_rate(cfg: CfgNode, *, processes: int = 1) -> tuple[CfgNode, list[str]]:
    """A config with the rate of ``SOLVER.SCALE_LR_TO_BATCH``, linear in the batch, and what was done.

    ``SOLVER.BASE_LR`` and ``BASE_LR_END`` are multiplied by ``IMS_PER_BATCH / SCALE_LR_TO_BATCH``. That key is 0 in
    what is returned: a run that goes on with it has the same rate. What detectron2 scales by itself is said, not done.

    Args:
        processes: of the run, which detectron2's ``SOLVER.REFERENCE_WORLD_SIZE`` compares with.
    """
    solver, lines = cfg.SOLVER, []
    if solver.REFERENCE_WORLD_SIZE not in (0, processes):
        scale = processes / solver.REFERENCE_WORLD_SIZE
        lines.append(
            f"SOLVER.REFERENCE_WORLD_SIZE is {solver.REFERENCE_WORLD_SIZE}, and there are {processes} processes: "
            f"detectron2 multiplies IMS_PER_BATCH and BASE_LR by {scale:g} (BASE_LR {solver.BASE_LR * scale:g}), and "
            "divides iterations by it"
        )
    if not solver.SCALE_LR_TO_BATCH:
        return cfg, lines
    scale = solver.IMS_PER_BATCH / solver.SCALE_LR_TO_BATCH
    values = {f"SOLVER.{key}": solver[key] * scale for key in ("BASE_LR", "BASE_LR_END")}
    lines.append(
        f"SOLVER.SCALE_LR_TO_BATCH {solver.SCALE_LR_TO_BATCH}: SOLVER.IMS_PER_BATCH is {solver.IMS_PER_BATCH}, and "
        f"SOLVER.BASE_LR {solver.BASE_LR:g} becomes {values['SOLVER.BASE_LR']:g}"
    )
    return _merged(cfg, values | {"SOLVER.SCALE_LR_TO_BATCH": 0}), lines


def _scaled_steps(cfg: CfgNode, iterations: int) -> tuple[int, ...]:
    solver = cfg.SOLVER
    if solver.LR_SCHEDULER_NAME != "WarmupMultiStepLR":
        return tuple(solver.STEPS)
    scaled = (round(step / solver.MAX_ITER * iterations) for step in solver.STEPS if step < solver.MAX_ITER)
    # Of a few iterations two steps may become one, or the end.
    return tuple(sorted({step for step in scaled if 0 < step < iterations}))


def _merged(cfg: CfgNode, values: dict[str, object]) -> CfgNode:
    merged = cfg.clone()
    merged.defrost()
    merged.merge_from_list([item for pair in values.items() for item in pair])
    if cfg.is_frozen():
        merged.freeze()
    return merged
