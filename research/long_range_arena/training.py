"""Train on a task as lra/run_tasks.py does, and measure a step against the length of the sequences."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.flop_counter import FlopCounterMode

from backbones.checkpoint_files import read_checkpoint, write_checkpoint
from backbones.errors import ConfigError
from research.long_range_arena.data import Dataset, Examples
from research.long_range_arena.model import SequenceClassifier, create_classifier
from research.long_range_arena.tasks import ADAM_BETAS, ADAM_EPSILON, MODELS, Settings
from research.sequences import Learner, Step, format_table, peak_memory, seconds_interleaved, train

CHECKPOINT = "model_best.pth"


def train_classifier(
    settings: Settings,
    dataset: Dataset,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    device: str = "cpu",
    log: Callable[[dict[str, Any]], None] = lambda evaluation: None,
) -> tuple[SequenceClassifier, dict[str, Any]]:
    """Train, evaluate on ``val`` every ``eval_every`` steps and at the end, and evaluate the best weights on ``test``.

    Args:
        output: folder for the best checkpoint; None for no file.
        overwrite: whether a checkpoint there may be replaced.
        log: called with each evaluation: step, train_loss, loss, accuracy (on ``val``) and seconds.

    Returns:
        The model with the best weights, and the figures: ``test``, ``best``, ``chance``, ``parameters``, ``seconds``
        and ``evaluations``.

    Raises:
        ConfigError: where the loss is not finite, and for a folder that has a checkpoint.
    """
    path = None if output is None else Path(output) / CHECKPOINT
    if path is not None and path.exists() and not overwrite:
        raise ConfigError(f"{path} exists: choose another output folder, or add --overwrite")
    torch.manual_seed(settings.seed)
    model = create_classifier(settings).to(device)
    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=ADAM_BETAS, eps=ADAM_EPSILON, weight_decay=settings.weight_decay
    )
    scheduler = OneCycleLR(
        optimizer,
        max_lr=rate,
        total_steps=settings.steps,
        pct_start=settings.warmup_steps / settings.steps,
        anneal_strategy="linear",
    )
    learner = Learner(settings.model, model, optimizer)
    batches = dataset.train.shuffled_batches(settings.batch_size, settings.seed)
    evaluations: list[dict[str, Any]] = []
    best: dict[str, Any] = {"accuracy": -1.0}
    best_weights: dict[str, Tensor] = {}

    def compute_losses(learner: Learner, step: int) -> Iterator[Tensor]:
        # As run_tasks.py: a fixed learning rate stays as it is after the warm-up.
        if step and (settings.schedule == "linear" or step <= settings.warmup_steps):
            scheduler.step()
        batch = next(batches).to(device)
        yield F.cross_entropy(model(batch.documents), batch.labels)

    def evaluate_and_keep_best(step: int) -> None:
        nonlocal best, best_weights
        figures = evaluate(model, dataset.val, settings.batch_size)
        evaluation = {"step": step, "train_loss": learner.take_mean_loss(), **figures, "seconds": learner.seconds}
        evaluations.append(evaluation)
        if figures["accuracy"] > best["accuracy"]:
            best, best_weights = evaluation, copy.deepcopy(model.state_dict())
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                contents = {"model": best_weights, "lra": dataclasses.asdict(settings), "evaluation": evaluation}
                write_checkpoint(path, contents)
        log(evaluation)

    train([learner], compute_losses, evaluate_and_keep_best, steps=settings.steps, eval_every=settings.eval_every)
    model.load_state_dict(best_weights)
    return model, {
        "test": evaluate(model, dataset.test, settings.batch_size),
        "best": best,
        "chance": dataset.test.chance,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": learner.seconds,
        "evaluations": evaluations,
    }


@torch.no_grad()
def evaluate(model: SequenceClassifier, examples: Examples, batch_size: int) -> dict[str, float]:
    """Return the mean loss and the accuracy, 0 to 1, on all samples of a split."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    loss, correct = 0.0, 0
    for batch in examples.batches_in_order(batch_size):
        batch = batch.to(device)
        logits = model(batch.documents)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum").item()
        correct += int((logits.argmax(dim=-1) == batch.labels).sum())
    model.train(was_training)
    return {"loss": loss / len(examples), "accuracy": correct / len(examples)}


def load_lra_classifier(path: str | Path) -> tuple[SequenceClassifier, Settings]:
    """Load a checkpoint of :func:`train_classifier`: the model in eval mode, and its settings."""
    contents = read_checkpoint(path)
    if "lra" not in contents:
        raise ConfigError(f"{path} is not a checkpoint of research.long_range_arena")
    settings = Settings(**contents["lra"])
    model = create_classifier(settings)
    model.load_state_dict(contents["model"])
    return model.eval(), settings


@dataclasses.dataclass(frozen=True)
class _StepAtLength:
    """Builds the forward and backward pass of one model on sequences of one length."""

    settings: Settings
    batch_size: int
    device: str

    def build(self) -> Step:
        torch.manual_seed(0)
        model = create_classifier(self.settings).to(self.device)
        shape = (self.batch_size, self.settings.max_length)
        documents = ((torch.randint(1, 16, shape, device=self.device), None),) * self.settings.num_documents
        labels = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)

        def step() -> None:
            model.zero_grad()
            F.cross_entropy(model(documents), labels).backward()

        return step

    def count(self) -> tuple[nn.Module, int]:
        """Return the model without memory, and the multiply-adds of its forward pass for one sequence."""
        with torch.device("meta"):
            model = create_classifier(self.settings).eval().requires_grad_(False)
            ids = torch.empty(1, self.settings.max_length, dtype=torch.int64)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(((ids, None),) * self.settings.num_documents)
        return model, counter.get_total_flops() // 2


def measure_lengths(
    settings: Settings,
    lengths: Sequence[int],
    *,
    models: Sequence[str] = MODELS,
    batch_size: int = 1,
    device: str = "cpu",
    runs: int = 3,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measure a forward and backward pass of each model at each length (in the manner of LS figure 3).

    Returns:
        For each length and model ``length``, ``model``, ``parameters``, ``multiply_adds`` (of the forward pass of one
        sequence, matrix products only), ``seconds`` (median, the models interleaved) and ``memory`` (bytes at the peak;
        None where it was not measured).
    """
    rows = []
    for length in lengths:
        cases = {
            name: _StepAtLength(dataclasses.replace(settings, model=name, max_length=length), batch_size, device)
            for name in models
        }
        steps = {name: case.build() for name, case in cases.items()}
        for step in steps.values():
            step()
        seconds = seconds_interleaved(steps, runs, device)
        del steps
        for name, case in cases.items():
            model, multiply_adds = case.count()
            row = {"length": length, "model": name, "parameters": sum(p.numel() for p in model.parameters())}
            row |= {"multiply_adds": multiply_adds, "seconds": seconds[name], "memory": None}
            if memory:
                small = dataclasses.replace(case, settings=dataclasses.replace(case.settings, max_length=16))
                what = f"{name} at length {length}"
                row["memory"] = peak_memory(case.build, warm_up=small.build, device=device, what=what)
            rows.append(row)
    return rows


def format_lengths(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of :func:`measure_lengths` as a table."""
    table = [("length", "model", "params M", "1e9 mult-adds", "seconds", "MB")]
    for row in rows:
        memory = "-" if row["memory"] is None else f"{row['memory'] / 1e6:.0f}"
        numbers = (f"{row['parameters'] / 1e6:.3f}", f"{row['multiply_adds'] / 1e9:.3f}", f"{row['seconds']:.3f}")
        table.append((str(row["length"]), row["model"], *numbers, memory))
    return format_table(table)
