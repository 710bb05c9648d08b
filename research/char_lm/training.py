"""Train one or two language models on parallel streams of a text, evaluate them, and generate text."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.checkpoint_files import read_checkpoint, write_checkpoint
from backbones.errors import ConfigError
from research.char_lm.model import BETAS, EPSILON, VOCAB_SIZE, ModelSize, Phase, create_model
from research.char_lm.text import Streams, Text, Vocabulary
from research.sequence.training import Learner, Step, train

LAST = "last.pth"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run.

    Attributes:
        models: Models to train on the same blocks.
        memory_length: Bytes of memory; None for the length of a block, as in the paper.
        accumulate: Gradient accumulation steps, which divide the streams of a step.
        eval_every: Steps between two evaluations on the validation part. Each evaluation saves a checkpoint.
    """

    models: tuple[str, ...]
    size: ModelSize
    phases: tuple[Phase, ...]
    dropout: float
    weight_decay: float
    seed: int = 0
    memory_length: int | None = None
    accumulate: int = 1
    eval_every: int = 1000


class Training:
    """A run of one or two models.

    Each phase starts from the best weights so far on the validation part, with a new optimizer, at the start of the
    text. At the end of the text, training continues at the start with an empty memory. On a CPU, a resumed run gives
    bitwise the same weights as a run without interruption.

    Args:
        output: Folder for ``last.pth``, with the state, and ``best_MODEL.pth``.
        resume: Whether to resume from ``last.pth``.

    Attributes:
        evaluations: Dicts with model, phase, step, train and val (bits per character) and seconds.

    Raises:
        ConfigError: If the text is too short, the folder already has a run, or the run to resume has other settings.
    """

    def __init__(
        self, settings: Settings, text: Text, output: Path, *, device: str = "cpu", resume: bool = False
    ) -> None:
        self.settings, self.text, self.output, self.device = settings, text, output, device
        self.fingerprint = {**asdict(settings), "sha256 of the text": text.sha256}
        self.evaluations: list[dict[str, Any]] = []
        self.phase, self.done = 0, 0
        self.learners: dict[str, Learner] = {}
        self.memories: dict[str, list[Sequence[Tensor] | None]] = {}
        self._state: dict[str, Any] = {}
        for phase in settings.phases:
            bytes_per_stream = (len(text.train) - 1) // phase.batch_size
            if bytes_per_stream < phase.length or phase.batch_size % settings.accumulate:
                raise ConfigError(
                    f"batch_size={phase.batch_size} streams of {bytes_per_stream} bytes are shorter than a block of "
                    f"length={phase.length}, or not a multiple of accumulate={settings.accumulate}. Change batch_size."
                )
        path = output / LAST
        if not resume:
            if path.exists():
                raise ConfigError(f"'{path}' already exists. Add --resume, or choose another output folder.")
            output.mkdir(parents=True, exist_ok=True)
            return
        self._state = read_checkpoint(path)
        before = self._state.get("char_lm", {})
        if names := [name for name, value in self.fingerprint.items() if before.get(name) != value]:
            raise ConfigError(f"'{path}' is from a run with other settings: {', '.join(names)}. Use the same settings.")
        self.phase, self.done = self._state["phase"], self._state["done"]
        self.evaluations = self._state["evaluations"]
        logging.getLogger(__name__).info("resumed after step %d of phase %d", self.done, self.phase + 1)

    def run(self, log: Callable[[dict[str, Any]], None] = lambda evaluation: None) -> None:
        """Train to the end of the last phase; ``log`` is called with each evaluation."""
        while self.phase < len(self.settings.phases):
            phase = self.settings.phases[self.phase]
            self._start_phase(phase)
            train(
                list(self.learners.values()),
                partial(self._losses, phase, Streams(self.text.train, phase.batch_size, phase.length)),
                partial(self._evaluate_and_save, phase, log),
                first=self.done,
                steps=phase.steps,
                eval_every=self.settings.eval_every,
            )
            self.phase, self.done = self.phase + 1, 0

    def _memory_length(self, phase: Phase) -> int:
        return self.settings.memory_length or phase.length

    def _start_phase(self, phase: Phase) -> None:
        """Create the models with the memory length of a phase, and load the state to continue from."""
        for name in self.settings.models:
            torch.manual_seed(self.settings.seed)
            model = create_model(
                name,
                self.settings.size,
                vocab_size=len(self.text.vocabulary),
                memory_length=self._memory_length(phase),
                dropout=self.settings.dropout,
            )
            model = model.to(self.device).train()
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=self.settings.weight_decay
            )
            learner = self.learners[name] = Learner(name, model, optimizer)
            learner.seconds = max((row["seconds"] for row in self.evaluations if row["model"] == name), default=0.0)
            self.memories[name] = [None] * self.settings.accumulate
        state, self._state = self._state, {}
        if state:
            self._models().load_state_dict(state["model"])
        if self.done:
            for name, learner in self.learners.items():
                learner.optimizer.load_state_dict(state["optimizers"][name])
                learner.losses = state["losses"][name]
                self.memories[name] = [
                    memory and tuple(layer.to(self.device) for layer in memory) for memory in state["memories"][name]
                ]

    def _models(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: learner.model for name, learner in self.learners.items()})

    def _losses(self, phase: Phase, streams: Streams, learner: Learner, step: int) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch of a step."""
        index, memories = step % len(streams), self.memories[learner.name]
        if index == 0:
            memories[:] = [None] * len(memories)
        # Dropout depends only on the step, so it is the same in a resumed run, and with one or two models.
        torch.manual_seed((self.settings.seed << 40) + (self.phase << 36) + step + 1)
        for group in learner.optimizer.param_groups:
            group["lr"] = phase.learning_rate_at(step)
        inputs, targets, _ = streams.block(index)
        inputs, targets = (x.to(self.device).tensor_split(len(memories)) for x in (inputs, targets))
        number = sum(following.numel() for following in targets)
        for i, (ids, following) in enumerate(zip(inputs, targets, strict=True)):
            log_probabilities, memories[i] = learner.model(ids, memories[i])
            loss = F.nll_loss(log_probabilities.flatten(0, 1), following.flatten(), reduction="sum")
            yield loss / number

    def _evaluate_and_save(self, phase: Phase, log: Callable[[dict[str, Any]], None], step: int) -> None:
        self.done = step
        for name, learner in self.learners.items():
            options = {"length": phase.length, "num_streams": phase.batch_size, "device": self.device}
            val = bits_per_character(learner.model, self.text.val, self.text.vocabulary, **options)
            if not math.isfinite(val):
                raise ConfigError(f"Bits per character of {name} are {val}. Lower the learning rate.")
            bits = learner.take_mean_loss() / math.log(2)
            best = min((row["val"] for row in self.evaluations if row["model"] == name), default=math.inf)
            row = {"model": name, "phase": self.phase + 1, "step": step, "train": bits, "val": val}
            self.evaluations.append(row | {"seconds": learner.seconds})
            if val < best:
                trained = {"name": name, "size": asdict(self.settings.size), "val": val, "length": phase.length}
                trained |= {"vocabulary": self.text.vocabulary.known, "memory_length": self._memory_length(phase)}
                write_checkpoint(
                    best_path(self.output, name), {"model": learner.model.state_dict(), "char_lm_model": trained}
                )
            log(self.evaluations[-1])
        if step == phase.steps:
            for name, learner in self.learners.items():
                learner.model.load_state_dict(read_checkpoint(best_path(self.output, name))["model"])
            state: dict[str, Any] = {"phase": self.phase + 1, "done": 0}
        else:
            state = {"phase": self.phase, "done": step, "memories": self.memories}
            state["optimizers"] = {name: learner.optimizer.state_dict() for name, learner in self.learners.items()}
            state["losses"] = {name: learner.losses for name, learner in self.learners.items()}
        state |= {"model": self._models().state_dict(), "evaluations": self.evaluations}
        write_checkpoint(self.output / LAST, state | {"char_lm": self.fingerprint})
        self._state = state if step == phase.steps else {}


def best_path(folder: Path, name: str) -> Path:
    """Return the path of a model's best weights on the validation part."""
    return folder / f"best_{name}.pth"


def load_trained(
    path: str | Path, *, memory_length: int | None = None, device: str = "cpu"
) -> tuple[nn.Module, Vocabulary, dict[str, Any]]:
    """Load a ``best_MODEL.pth``.

    Args:
        memory_length: Bytes of memory; None for the value in training.

    Returns:
        The model in eval mode, its vocabulary, and the training: ``name``, ``size``, ``length`` (bytes of a block),
        ``memory_length`` and ``val`` (bits per character).

    Raises:
        ConfigError: If the file is another checkpoint.
    """
    contents = read_checkpoint(path)
    if "char_lm_model" not in contents:
        raise ConfigError(f"'{path}' is not a best_*.pth of research.char_lm. Use a checkpoint of its train command.")
    trained = contents["char_lm_model"]
    vocabulary = Vocabulary(trained["vocabulary"])
    trained["memory_length"] = memory_length or trained["memory_length"]
    sizes = {"vocab_size": len(vocabulary), "memory_length": trained["memory_length"]}
    model = create_model(trained["name"], ModelSize(**trained["size"]), **sizes)
    model.load_state_dict(contents["model"])
    return model.to(device).eval(), vocabulary, trained


@torch.no_grad()
def bits_per_character(
    model: nn.Module,
    ids: Tensor,
    vocabulary: Vocabulary,
    *,
    length: int,
    step: int | None = None,
    num_streams: int = 1,
    device: str = "cpu",
) -> float:
    """Return the mean of -log2 of the probability of each byte of ``ids``, (T,), except for the first.

    All unknown bytes share the probability of the unknown id equally.

    Args:
        length: Bytes of a block. The memory passes from block to block.
        step: None for blocks, or the bytes from one sequence of ``length`` bytes to the next (section 4.2). Each
            sequence starts without a memory. All its predictions count for the first sequence, and the last ``step``
            for the others.
        num_streams: Number of parts to evaluate in parallel. Each starts with an empty memory, so more parts are faster
            and slightly worse. Sequences are evaluated one by one.
    """
    if step is not None and step > length:
        raise ConfigError(f"step={step} is larger than length={length}. Set it to at most {length}.")
    was_training = model.training
    model.eval()
    total, num_unknown = 0.0, 0
    parts = _blocks(model, ids, length, num_streams, device)
    if step is not None:
        parts = _sequences(model, ids, length, step, device)
    for log_probabilities, targets in parts:
        total -= log_probabilities.gather(1, targets[:, None]).double().sum().item()
        num_unknown += int((targets == vocabulary.other).sum())
    model.train(was_training)
    bits_to_choose = math.log2(max(256 - len(vocabulary.known), 1))
    return (total / math.log(2) + num_unknown * bits_to_choose) / (len(ids) - 1)


def _blocks(
    model: nn.Module, ids: Tensor, length: int, num_streams: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probabilities (N, V) and targets (N,) of each block."""
    streams, memory = Streams(ids, min(num_streams, len(ids) - 1), length), None
    for index in range(len(streams)):
        inputs, targets, is_first = (x.to(device) for x in streams.block(index))
        log_probabilities, memory = model(inputs, memory)
        yield log_probabilities[is_first], targets[is_first]


def _sequences(model: nn.Module, ids: Tensor, length: int, step: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probabilities (N, V) and targets (N,) that each overlapping sequence adds."""
    done, last = 0, len(ids) - 1
    for end in [*range(length, last, step), last]:
        part = ids[max(end - length, 0) : end + 1].long().to(device)
        log_probabilities, _ = model(part[None, :-1])
        yield log_probabilities[0, done - end :], part[done - end :]
        done = end


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    number: int,
    length: int,
    unknown: int,
    seed: int = 0,
    temperature: float = 1.0,
    device: str = "cpu",
) -> list[int]:
    """Sample ids that follow a prompt.

    The text is divided into blocks as in training. The memory has whole blocks only, and an incomplete block is
    computed again for each byte.

    Args:
        model: A model in eval mode.
        prompt: (P,) ids, one or more.
        number: Number of ids to sample.
        length: Bytes of a block.
        unknown: The id of unknown bytes, which is never sampled.
        temperature: Divides the log-probabilities, above 0.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, first, memory = prompt.tolist(), 0, None
    while True:
        # At least one byte stays in the block.
        while len(ids) - first > length:
            _, memory = model(torch.tensor([ids[first : first + length]], device=device), memory)
            first += length
        if len(ids) == len(prompt) + number:
            return ids[len(prompt) :]
        log_probabilities, _ = model(torch.tensor([ids[first:]], device=device), memory)
        scores = log_probabilities[0, -1].double().cpu()
        scores[unknown] = -torch.inf
        # The highest score is 0, so that a low temperature does not overflow.
        scores = (scores - scores.max()) / temperature
        ids.append(int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator)))


def build_step(name: str, size: ModelSize, batch_size: int, device: str, length: int | None) -> Step:
    """Build a training step on one block and a memory of the same length; without a length, a small step."""
    if length is None:
        length, batch_size = -(-size.window_size // size.segment_length) * size.segment_length, 1
        size = replace(size, dim=16 * size.num_heads, hidden_dim=16, depth=1)
    torch.manual_seed(0)
    model = create_model(name, size, vocab_size=VOCAB_SIZE, memory_length=length).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(VOCAB_SIZE, (batch_size, length + 1), device=device)
    memory = tuple(torch.randn(batch_size, length, size.dim, device=device) for _ in range(size.depth))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        log_probabilities, _ = model(ids[:, :-1], memory)
        F.nll_loss(log_probabilities.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return step
