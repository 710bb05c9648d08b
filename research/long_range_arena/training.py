"""Train on a task as lra/run_tasks.py does, and measure a step at several sequence lengths."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.flop_counter import FlopCounterMode

from backbones.checkpoint_files import read_checkpoint, write_checkpoint
from backbones.errors import ConfigError
from research.long_range_arena.data import Dataset, Examples
from research.long_range_arena.model import SequenceClassifier, create_classifier
from research.long_range_arena.tasks import ADAM_BETAS, ADAM_EPSILON, MODELS, Settings, published_multiply_adds
from research.sequence.training import Learner, Step, measure_lengths, train

CHECKPOINT = "model_best.pth"


def checkpoint_path(output: str | Path, *, overwrite: bool = False) -> Path:
    """Return the path of the checkpoint in a folder. Raise a ConfigError if it exists and ``overwrite`` is False."""
    path = Path(output) / CHECKPOINT
    if path.exists() and not overwrite:
        raise ConfigError(f"'{path}' already exists. Choose another output folder, or add --overwrite.")
    return path


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
        output: Folder for the best checkpoint; None for no file.
        overwrite: Whether a checkpoint there may be replaced.
        log: Called with each evaluation: step, train_loss, loss, accuracy (on ``val``) and seconds.

    Returns:
        The model with the best weights, and the results: ``test``, ``best``, ``chance``, ``parameters``, ``seconds``
        and ``evaluations``.

    Raises:
        ConfigError: If the loss is not finite, or if the folder has a checkpoint and ``overwrite`` is False.
    """
    path = None if output is None else checkpoint_path(output, overwrite=overwrite)
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
    batches = dataset.train.shuffled_batches(settings.batch_size, settings.seed, device)
    evaluations: list[dict[str, Any]] = []
    best: dict[str, Any] = {"accuracy": -1.0}
    best_weights: dict[str, Tensor] = {}

    def compute_losses(learner: Learner, step: int) -> Iterator[Tensor]:
        # As in run_tasks.py, a fixed learning rate is constant after the warm-up.
        if step and (settings.schedule == "linear" or step <= settings.warmup_steps):
            scheduler.step()
        documents, labels = next(batches)
        yield F.cross_entropy(model(documents), labels)

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
    for start in range(0, len(examples), batch_size):
        documents, labels = examples.batch(range(start, min(start + batch_size, len(examples))), device)
        logits = model(documents)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(dim=-1) == labels).sum())
    model.train(was_training)
    return {"loss": loss / len(examples), "accuracy": correct / len(examples)}


def load_lra_classifier(path: str | Path) -> tuple[SequenceClassifier, Settings]:
    """Load a checkpoint of :func:`train_classifier`. Return the model in eval mode and its settings."""
    contents = read_checkpoint(path)
    if "lra" not in contents:
        raise ConfigError(f"'{path}' is not a checkpoint of research.long_range_arena. Use its model_best.pth.")
    settings = Settings(**contents["lra"])
    model = create_classifier(settings)
    model.load_state_dict(contents["model"])
    return model.eval(), settings


def measure_models(
    settings: Settings,
    lengths: Sequence[int],
    *,
    models: Sequence[str] = MODELS,
    batch_size: int = 1,
    device: str = "cpu",
    runs: int = 3,
    memory: bool = True,
) -> list[dict[str, Any]]:
    """Measure a forward and backward pass: the rows of :func:`.measure_lengths`.

    Each also has the counts of :func:`count_costs`.
    """
    cases = {name: dataclasses.replace(settings, model=name) for name in models}
    builders = {name: partial(_build_step, case, batch_size, device) for name, case in cases.items()}
    rows = measure_lengths(builders, lengths, device=device, runs=runs, memory=memory)
    return [row | count_costs(dataclasses.replace(cases[row["model"]], max_length=row["length"])) for row in rows]


def _build_step(settings: Settings, batch_size: int, device: str, length: int | None) -> Step:
    torch.manual_seed(0)
    settings = dataclasses.replace(settings, max_length=length or 16)
    model = create_classifier(settings).to(device)
    ids = torch.randint(1, 16, (batch_size, settings.max_length), device=device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(((ids, None),) * settings.num_documents), labels).backward()

    return step


def count_costs(settings: Settings) -> dict[str, int]:
    """Count the parameters and the multiply-adds of a forward pass of a sample of ``max_length`` tokens.

    Returns:
        ``parameters``; ``multiply_adds``, the matrix products as computed; ``as_published``, see
        :func:`.published_multiply_adds`.
    """
    with torch.device("meta"):
        model = create_classifier(settings).eval().requires_grad_(False)
        ids = torch.empty(1, settings.max_length, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(((ids, None),) * settings.num_documents)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = counter.get_total_flops() // 2
    return {"parameters": parameters, "multiply_adds": flops, "as_published": published_multiply_adds(settings)}
