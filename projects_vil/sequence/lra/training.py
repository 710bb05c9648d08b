"""Training on the Long Range Arena as lra/run_tasks.py does it: the best on dev is kept, and judged on test."""

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from backbones.sequence.variants import EncoderSizes
from backbones.utils.errors import InputError, check_choice
from backbones.utils.files import check_writable, read_checkpoint, write_checkpoint
from projects_vil.sequence.lra.examples import Dataset, Examples
from projects_vil.sequence.lra.model import SequenceClassifier, create_lra_classifier
from projects_vil.sequence.lra.settings import ADAM_BETAS, ADAM_EPSILON, SCHEDULES, Settings, TaskData
from projects_vil.utils import check_output_folder, run_lock

CHECKPOINT = "model_best.pth"
# What a generator of PyTorch takes.
MOST_SEEDS = 2**63


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained, and how.

    Attributes:
        settings: sizes and the course of the training.
        model: ``"ls"`` or ``"full"``.
        schedule: after the warm-up, ``"linear"``: down to nothing, as run_tasks.py does by default and as its scripts
            call it; ``"fixed"``: the same rate on, as appendix B says.
        seed: of the weights, of dropout and of the order of the samples.
        device: ``"cpu"`` or ``"cuda"``.
    """

    settings: Settings
    model: str = "ls"
    schedule: str = "linear"
    seed: int = 0
    device: str = "cpu"

    def check(self) -> None:
        """Raise an :class:`InputError` for values that nothing can be trained with."""
        check_choice("schedule", self.schedule, SCHEDULES)
        task = self.settings
        for option, value in (("steps", task.steps), ("batch-size", task.batch_size), ("eval-every", task.eval_every)):
            if value < 1:
                raise InputError(f"--{option} {value}: it is 1 or more")
        # OneCycleLR has no warm-up of one step: it would rise in no time.
        if task.warmup_steps == 1 or not 0 <= task.warmup_steps < task.steps:
            raise InputError(
                f"--warmup {task.warmup_steps} --steps {task.steps}: the warm-up takes 0 steps, or 2 and more, and "
                "ends before the last one"
            )
        if not 0 < task.learning_rate <= 1:
            raise InputError(f"--lr {task.learning_rate}: it is above 0 and at most 1")
        if not (task.weight_decay >= 0 and math.isfinite(task.weight_decay)):
            raise InputError(f"--weight-decay {task.weight_decay}: it is 0 or more")
        if not 0 <= self.seed < MOST_SEEDS:
            raise InputError(f"--seed {self.seed}: it is from 0 to {MOST_SEEDS - 1}")
        with torch.device("meta"):
            self.create_model()

    def create_model(self) -> SequenceClassifier:
        """With random weights."""
        return create_lra_classifier(self.settings, model=self.model)


@dataclasses.dataclass(frozen=True)
class Score:
    """Mean loss, and the share of samples that were classified rightly."""

    loss: float
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What stood at a step: the mean loss of training since the last one, dev, and seconds since the start."""

    step: int
    train_loss: float
    dev: Score
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Of a run.

    Attributes:
        test: of the weights that were best on dev.
        best: the evaluation that chose them.
        chance: the share of the most frequent class of test.
        parameters: number of them.
        seconds: of training and its evaluations.
        evaluations: all of them.
    """

    test: Score
    best: Evaluation
    chance: float
    parameters: int
    seconds: float
    evaluations: tuple[Evaluation, ...]


def check_output(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise an :class:`InputError` for what is no folder, or has a run's checkpoint that is not to be overwritten."""
    path = Path(folder) / CHECKPOINT
    check_output_folder(folder)
    if path.exists() and not overwrite:
        raise InputError(f"--output {folder}: {path} is there already: take another folder, or add --overwrite")


def train_lra(
    run: Run, dataset: Dataset, *, output: str | Path | None = None, report: Callable[[Evaluation], None] | None = None
) -> tuple[SequenceClassifier, Result]:
    """Train, evaluate on dev every ``eval_every`` steps and at the end, and judge the best on test.

    Args:
        run: what is trained.
        dataset: of its task.
        output: folder that the best checkpoint is written to, as it is found, made where it is not there; None for
            none.
        report: called after each evaluation.

    Returns:
        The model with the weights that were best on dev, and the figures.

    Raises:
        InputError: as :meth:`Run.check`, where the loss is no number, and for a folder that cannot be written to, or
            that another run writes to.
    """
    run.check()
    if output is None:
        return _train(run, dataset, None, report)
    path = Path(output) / CHECKPOINT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: the folder cannot be made: {error.strerror}") from error
    check_writable(path)
    with run_lock(path.parent, key="--output"):
        return _train(run, dataset, path, report)


def _train(
    run: Run, dataset: Dataset, path: Path | None, report: Callable[[Evaluation], None] | None
) -> tuple[SequenceClassifier, Result]:
    task = run.settings
    torch.manual_seed(run.seed)
    model = run.create_model().to(run.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, betas=ADAM_BETAS, eps=ADAM_EPSILON, weight_decay=task.weight_decay
    )
    scheduler = OneCycleLR(
        optimizer,
        max_lr=task.learning_rate,
        total_steps=task.steps,
        pct_start=task.warmup_steps / task.steps,
        anneal_strategy="linear",
    )
    batches = dataset.train.endlessly(task.batch_size, run.seed)
    evaluations: list[Evaluation] = []
    best_weights: dict[str, Any] = {}
    best: Evaluation | None = None
    losses, start = [], time.perf_counter()
    for step in range(1, task.steps + 1):
        losses.append(_step(model, optimizer, next(batches).to(run.device), step))
        # As run_tasks.py: from the end of the warm-up on a fixed rate is not touched.
        if step < task.steps and (run.schedule == "linear" or step <= task.warmup_steps):
            scheduler.step()
        if step % task.eval_every and step != task.steps:
            continue
        dev = score(model, dataset.dev, task.batch_size)
        evaluation = Evaluation(step, sum(losses) / len(losses), dev, time.perf_counter() - start)
        evaluations.append(evaluation)
        losses = []
        if best is None or dev.accuracy > best.dev.accuracy:
            best, best_weights = evaluation, copy.deepcopy(model.state_dict())
            if path is not None:
                _save(path, run, best_weights, evaluation)
        if report is not None:
            report(evaluation)
    seconds = time.perf_counter() - start
    model.load_state_dict(best_weights)
    test = score(model, dataset.test, task.batch_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return model, Result(test, best, dataset.test.chance, parameters, seconds, tuple(evaluations))


def score(model: SequenceClassifier, examples: Examples, batch_size: int) -> Score:
    """Of all samples of a split; the model stays in the mode that it is in."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for batch in examples.in_order(batch_size):
            batch = batch.to(device)
            logits = model(batch.documents)
            loss += F.cross_entropy(logits, batch.labels, reduction="sum").item()
            right += int((logits.argmax(dim=-1) == batch.labels).sum())
    model.train(was_training)
    return Score(loss / len(examples), right / len(examples))


def load_lra_classifier(path: str | Path) -> tuple[SequenceClassifier, Run]:
    """A model with the weights of a run's checkpoint, in eval mode, and what was trained.

    Raises:
        InputError: for a file that is none of these.
    """
    contents = read_checkpoint(path)
    try:
        said = contents["lra"]
        parts = {"sizes": EncoderSizes(**said["settings"]["sizes"]), "data": TaskData(**said["settings"]["data"])}
        run = Run(**said | {"settings": Settings(**said["settings"] | parts)})
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is no checkpoint of tools/train_lra.py") from error
    model = run.create_model()
    try:
        model.load_state_dict(contents["model"])
    except RuntimeError as error:
        raise InputError(f"{path} does not fit the model that it says it is of") from error
    return model.eval(), run


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> float:
    loss = F.cross_entropy(model(batch.documents), batch.labels)
    value = loss.item()
    if not math.isfinite(value):
        raise InputError(f"the loss is {value} at step {step}: take a lower --lr or a longer --warmup")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return value


def _save(path: Path, run: Run, weights: dict[str, Any], evaluation: Evaluation) -> None:
    write_checkpoint(
        path, {"model": weights, "lra": dataclasses.asdict(run), "evaluation": dataclasses.asdict(evaluation)}
    )
    logging.getLogger(__name__).info("wrote %s", path)
