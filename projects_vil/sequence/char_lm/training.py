"""Training on parallel streams with a memory that goes from part to part, of one model or of two by turns."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backbones.sequence.variants import Phase
from backbones.utils.errors import InputError
from projects_vil.sequence.char_lm.checkpoints import (
    LAST,
    Trained,
    best_path,
    load_trained,
    read_run,
    save_run,
    save_trained,
)
from projects_vil.sequence.char_lm.evaluation import bits_per_character
from projects_vil.sequence.char_lm.models.build import KINDS, Memory, create_model, kept
from projects_vil.sequence.char_lm.models.presets import (
    BETAS,
    EPSILON,
    ModelSize,
    dropout_of,
    phases_of,
    size_of,
    weight_decay_of,
)
from projects_vil.sequence.char_lm.texts.streams import Part, Streams
from projects_vil.sequence.char_lm.texts.text import Text
from projects_vil.utils import check_output_folder, run_lock

# A seed, a phase and a step make one number of 64 bits.
MOST_SEEDS = 2**20
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a run is.

    Attributes:
        kinds: of model that train by turns.
        memory_length: bytes before a part that it sees; None for as many as a part has, as in the paper.
        accumulate: into how many groups, one after the other, the streams of a step are divided.
        eval_period: steps between two evaluations on dev, each of which saves.
    """

    kinds: tuple[str, ...]
    size: ModelSize
    phases: tuple[Phase, ...]
    dropout: float
    weight_decay: float
    seed: int = 0
    memory_length: int | None = None
    accumulate: int = 1
    eval_period: int = 1000

    def memory_of(self, phase: Phase) -> int:
        """Bytes before a part of this phase that a model sees."""
        return phase.length if self.memory_length is None else self.memory_length


@dataclass(frozen=True)
class Line:
    """A run's state at one evaluation, of one model.

    Attributes:
        step: of the phase, from 1.
        train, dev: bits per character: the mean since the line before, with dropout, and of the whole dev part.
        seconds: spent on this model's steps in all phases until then.
    """

    kind: str
    phase: int
    step: int
    train: float
    dev: float
    seconds: float


def rate_of(phase: Phase, step: int) -> float:
    """The learning rate of a step, from 0: a linear rise, then constant (appendix C; fairseq's "fixed")."""
    return phase.learning_rate * min(1.0, (step + 1) / max(phase.warmup_steps, 1))


class _Contestant:
    """A model in training, with its optimizer and what it remembers of each group of streams."""

    def __init__(self, kind: str, model: nn.Module, weight_decay: float, groups: int) -> None:
        self.kind, self.model = kind, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=weight_decay
        )
        self.memories: list[Memory] = [None] * groups
        self.seconds, self.summed, self.counted = 0.0, 0.0, 0

    def step(self, part: Part, rate: float, device: torch.device) -> None:
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        groups = len(self.memories)
        inputs, targets = (x.to(device).tensor_split(groups) for x in (part.inputs, part.targets))
        bits = 0.0
        for index in range(groups):
            log_probabilities, self.memories[index] = self.model(inputs[index], self.memories[index])
            loss = F.nll_loss(log_probabilities.flatten(0, 1), targets[index].flatten(), reduction="sum")
            loss = loss / part.targets.numel()
            loss.backward()
            bits += loss.item() / math.log(2)
        self.optimizer.step()
        if not math.isfinite(bits):
            raise InputError(f"{self.kind}: the loss is {bits}: train with a smaller --rate or a longer --warm-up")
        self.summed, self.counted = self.summed + bits, self.counted + 1
        self.seconds += time.perf_counter() - began

    def state(self, *, with_course: bool) -> dict[str, Any]:
        """What the next step needs; at the end of a phase the seconds alone, since the next one begins anew."""
        if not with_course:
            return {"seconds": self.seconds}
        return {
            "optimizer": self.optimizer.state_dict(),
            "memories": [None if memory is None else list(memory) for memory in self.memories],
            "seconds": self.seconds,
            "summed": self.summed,
            "counted": self.counted,
        }

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.memories = [
            None if memory is None else kept(memory, lambda part: part.to(device)) for memory in state["memories"]
        ]
        self.seconds, self.summed, self.counted = state["seconds"], state["summed"], state["counted"]


class Training:
    """A run of one model, or of two that take each step by turns on the same parts.

    A phase starts from the weights that were the best on dev until then, with a new optimizer, at the text's start. At
    the end of a text it begins again, without a memory.

    Args:
        output: folder, made where it is not there.
        resume: go on from its last checkpoint, with the parts that follow.

    Raises:
        InputError: for settings that do not go together, a text that is too short for them, a folder that has a run
            already, or none to resume, or one with other settings.
    """

    def __init__(
        self,
        settings: Settings,
        text: Text,
        output: Path,
        *,
        device: torch.device | str = "cpu",
        resume: bool = False,
    ) -> None:
        if not resume:
            check_settings(settings, text)
        self.settings, self.text, self.output = settings, text, output
        self.device = torch.device(device)
        self.lines: list[Line] = []
        self.best: dict[str, float] = {}
        self.phase, self.done = 0, 0
        self.contestants: list[_Contestant] = []
        self._saved = self._begin(resume)
        if resume:
            # Of the same run, what it was begun with is named first where it is another now.
            check_settings(settings, text)

    def run(self, told: Callable[[Line], None] | None = None) -> None:
        """Train until the end of the last phase.

        Args:
            told: is told each line as it comes.
        """
        with run_lock(self.output, key="--output"):
            while self.phase < len(self.settings.phases):
                self._train_phase(told)
                self.phase, self.done = self.phase + 1, 0

    def _begin(self, resume: bool) -> tuple[dict, dict] | None:
        path = self.output / LAST
        check_output_folder(self.output)
        if not resume:
            if path.exists():
                raise InputError(f"--output {self.output} has a run already: --resume it, or choose another folder")
            for kind in self.settings.kinds:
                best = best_path(self.output, kind)
                if best.exists():
                    raise InputError(f"--output {self.output} has another run's {best.name}: choose another folder")
            try:
                self.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--output {self.output} cannot be made: {error.strerror}") from error
            return None
        weights, state = read_run(path, self._fingerprint())
        self.phase, self.done, self.best = state["phase"], state["done"], dict(state["best"])
        self.lines = [Line(**line) for line in state["lines"]]
        if self.phase == len(self.settings.phases):
            _LOGGER.info("%s is finished: nothing is left to train", self.output)
        else:
            _LOGGER.info("resumed after step %d of phase %d", self.done, self.phase + 1)
        return weights, state

    def _fingerprint(self) -> dict[str, Any]:
        flat = {name: value for name, value in asdict(self.settings).items() if name not in ("size", "phases")}
        flat |= {"kinds": ", ".join(self.settings.kinds), "phases": len(self.settings.phases)}
        for number, phase in enumerate(self.settings.phases, start=1):
            flat |= {f"{name} of phase {number}": value for name, value in asdict(phase).items()}
        return flat | asdict(self.settings.size) | {"the SHA-256 of the text": self.text.digest}

    def _train_phase(self, told: Callable[[Line], None] | None) -> None:
        phase = self.settings.phases[self.phase]
        streams = Streams(self.text.train, phase.batch_size, phase.length)
        self._enter(phase)
        while self.done < phase.steps:
            index = self.done % len(streams)
            part = streams.part(index)
            for contestant in self.contestants:
                if index == 0:
                    contestant.memories = [None] * self.settings.accumulate
                # Dropout by step, not by what ran before: a resumed run has the same, and so has a model alone.
                torch.manual_seed((self.settings.seed << 40) + (self.phase << 36) + self.done + 1)
                contestant.step(part, rate_of(phase, self.done), self.device)
            self.done += 1
            if self.done % self.settings.eval_period == 0 or self.done == phase.steps:
                self._evaluate(phase, told)
                self._save()

    def _enter(self, phase: Phase) -> None:
        """Models with the memory of a phase, and the weights to go on from."""
        seconds = {one.kind: one.seconds for one in self.contestants}
        weights = {one.kind: one.model.state_dict() for one in self.contestants}
        state: Mapping[str, Any] = {}
        if self._saved is not None:
            weights, state = self._saved
            seconds = {kind: one["seconds"] for kind, one in state["contestants"].items()}
        self._saved, self.contestants = None, []
        for kind in self.settings.kinds:
            torch.manual_seed(self.settings.seed)
            model = create_model(
                kind,
                self.settings.size,
                vocab_size=len(self.text.vocabulary),
                memory_length=self.settings.memory_of(phase),
                dropout=self.settings.dropout,
            )
            if kind in weights:
                model.load_state_dict(weights[kind])
            contestant = _Contestant(
                kind, model.to(self.device).train(), self.settings.weight_decay, self.settings.accumulate
            )
            if self.done and state:
                contestant.restore(state["contestants"][kind], self.device)
            else:
                contestant.seconds = seconds.get(kind, 0.0)
            self.contestants.append(contestant)

    def _evaluate(self, phase: Phase, told: Callable[[Line], None] | None) -> None:
        for contestant in self.contestants:
            dev = bits_per_character(
                contestant.model,
                self.text.dev,
                vocabulary=self.text.vocabulary,
                length=phase.length,
                num_streams=phase.batch_size,
                device=self.device,
            )
            if not math.isfinite(dev):
                raise InputError(
                    f"{contestant.kind}: bits per character on dev are {dev}: train with a smaller --rate or a longer "
                    "--warm-up"
                )
            train = contestant.summed / max(contestant.counted, 1)
            contestant.summed, contestant.counted = 0.0, 0
            line = Line(contestant.kind, self.phase + 1, self.done, train, dev, contestant.seconds)
            self.lines.append(line)
            if dev < self.best.get(contestant.kind, math.inf):
                self.best[contestant.kind] = dev
                save_trained(best_path(self.output, contestant.kind), self._trained(contestant, phase, dev))
            if told is not None:
                told(line)

    def _trained(self, contestant: _Contestant, phase: Phase, dev: float) -> Trained:
        return Trained(
            kind=contestant.kind,
            size=self.settings.size,
            vocabulary=self.text.vocabulary,
            length=phase.length,
            memory_length=self.settings.memory_of(phase),
            weights=contestant.model.state_dict(),
            facts={"phase": self.phase + 1, "step": self.done, "dev": dev},
        )

    def _save(self) -> None:
        is_end = self.done == self.settings.phases[self.phase].steps
        if is_end:
            # Not when the next phase begins: where a run broke off in that one, the best may be of it already.
            for contestant in self.contestants:
                best = load_trained(best_path(self.output, contestant.kind))
                contestant.model.load_state_dict(best.weights)
        state = {
            # After the last step of a phase, the first one of the next.
            "phase": self.phase + is_end,
            "done": 0 if is_end else self.done,
            "best": dict(self.best),
            "lines": [asdict(line) for line in self.lines],
            "contestants": {one.kind: one.state(with_course=not is_end) for one in self.contestants},
        }
        models = {contestant.kind: contestant.model for contestant in self.contestants}
        save_run(self.output / LAST, models, self._fingerprint(), state)


def check_settings(settings: Settings, text: Text) -> None:
    """Raise an :class:`InputError` where a run could not go through with these settings on this text."""
    for option, value in (("--accumulate", settings.accumulate), ("--eval-every", settings.eval_period)):
        if value < 1:
            raise InputError(f"{option} {value}: it is 1 or more")
    if not 0 <= settings.seed < MOST_SEEDS:
        raise InputError(f"--seed {settings.seed}: it is from 0 to {MOST_SEEDS - 1}")
    if not 0 <= settings.dropout < 1:
        raise InputError(f"--dropout {settings.dropout}: it is at least 0 and below 1")
    if not 0 <= settings.weight_decay < math.inf:
        raise InputError(f"--weight-decay {settings.weight_decay}: it is 0 or more")
    for kind in settings.kinds:
        for phase in settings.phases:
            memory_length = settings.memory_of(phase)
            if memory_length < 1:
                raise InputError(f"--memory {memory_length}: it is 1 or more")
            with torch.device("meta"):
                create_model(kind, settings.size, vocab_size=len(text.vocabulary), memory_length=memory_length)
    for number, phase in enumerate(settings.phases, start=1):
        if phase.steps <= phase.warmup_steps:
            raise InputError(
                f"phase {number}: --warm-up {phase.warmup_steps} is not over in --steps {phase.steps}: give a shorter "
                "one"
            )
        if phase.batch_size % settings.accumulate:
            raise InputError(f"--accumulate {settings.accumulate} does not divide --batch-size {phase.batch_size}")
        in_a_stream = (len(text.train) - 1) // phase.batch_size
        if in_a_stream < phase.length:
            raise InputError(
                f"phase {number}: the training part has {len(text.train)} bytes, {in_a_stream} for each of "
                f"{phase.batch_size} streams, and a part has {phase.length}: take a longer text, or a smaller "
                "--batch-size or --length"
            )


def settings_of(
    config: str,
    *,
    size: Mapping[str, int | None],
    phases: Mapping[str, Sequence[Any] | None],
    compare: str | None = None,
    dropout: float | None = None,
    weight_decay: float | None = None,
    seed: int = 0,
    memory_length: int | None = None,
    accumulate: int | None = None,
    eval_period: int | None = None,
) -> Settings:
    """The settings of a config of the paper, with other values where they are not None.

    Args:
        size: overrides of :func:`size_of`.
        phases: overrides of :func:`phases_of`.
        compare: another kind of model, or None.

    Raises:
        InputError: as those two.
    """
    return Settings(
        kinds=KINDS[:1] if compare is None else (KINDS[0], compare),
        size=size_of(config, **size),
        phases=phases_of(config, **phases),
        dropout=dropout_of(config) if dropout is None else dropout,
        weight_decay=weight_decay_of(config) if weight_decay is None else weight_decay,
        seed=seed,
        memory_length=memory_length,
        accumulate=1 if accumulate is None else accumulate,
        eval_period=1000 if eval_period is None else eval_period,
    )
