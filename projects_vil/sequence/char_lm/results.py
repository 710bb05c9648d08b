"""What a finished run is judged by, and how it is shown."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from projects_vil.sequence.char_lm.checkpoints import Trained
from projects_vil.sequence.char_lm.evaluation import bits_per_character
from projects_vil.sequence.char_lm.generation import generate
from projects_vil.sequence.char_lm.measuring import VOCABULARY_OF_MEASURING, Cost
from projects_vil.sequence.char_lm.models.build import KINDS, count_of
from projects_vil.sequence.char_lm.models.presets import PRESETS, size_of
from projects_vil.sequence.char_lm.texts.text import Text
from projects_vil.sequence.char_lm.training import Line
from projects_vil.sequence.costs import aligned

TITLES = {"long_short": "long-short", "full": "full attention"}


@dataclass(frozen=True)
class Sampling:
    """How a sample is drawn.

    Attributes:
        number: bytes of it.
    """

    number: int
    prompt: str
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class Result:
    """Of one model, with the weights that were the best on dev.

    Attributes:
        steps: of all phases; None for a file, which says only its own phase and step.
        seconds: of its training steps.
        dev, test: bits per character; dev as it was while training.
        sample: what it goes on with, or None.
    """

    kind: str
    parameters: int
    steps: int | None
    seconds: float | None
    dev: float
    test: float | None
    sample: str | None


def draw_sample(trained: Trained, sampling: Sampling, *, device: str = "cpu") -> str:
    """The prompt and what a model goes on with, as text; bytes that are no UTF-8 stand as the replacement character.

    Raises:
        InputError: for a prompt with bytes that the model does not know.
    """
    prompt = trained.vocabulary.encode_prompt(sampling.prompt)
    ids = generate(
        trained.build(device=device),
        prompt,
        number=sampling.number,
        length=trained.length,
        other=trained.vocabulary.other,
        seed=sampling.seed,
        temperature=sampling.temperature,
        device=device,
    )
    return trained.vocabulary.decode([*prompt.tolist(), *ids]).decode(errors="replace")


def bits_on_test(
    trained: Trained,
    text: Text,
    *,
    memory_length: int | None = None,
    length: int | None = None,
    num_streams: int = 1,
    device: str = "cpu",
) -> float:
    """Bits per character on the test part.

    Args:
        memory_length: bytes before a part; as many as in training without it.
        length: bytes of a part; as many as in training without it.
        num_streams: side by side; each begins without a memory.
    """
    model = trained.build(memory_length=memory_length, device=device)
    return bits_per_character(
        model,
        text.test,
        vocabulary=trained.vocabulary,
        length=length or trained.length,
        num_streams=num_streams,
        device=device,
    )


def judge(
    trained: Trained,
    *,
    test: float | None,
    sampling: Sampling | None,
    lines: Sequence[Line] = (),
    steps: int | None = None,
    device: str = "cpu",
) -> Result:
    """A trained model's figures and its sample, with the seconds of its run's lines."""
    seconds = [line.seconds for line in lines if line.kind == trained.kind]
    return Result(
        kind=trained.kind,
        parameters=count_of(trained.kind, trained.size, len(trained.vocabulary)),
        steps=steps,
        seconds=seconds[-1] if seconds else None,
        dev=trained.facts["dev"],
        test=test,
        sample=None if sampling is None else draw_sample(trained, sampling, device=device),
    )


def format_results(results: Sequence[Result], vocab_size: int) -> str:
    """A table of the models, and their samples."""
    rows = [("model", "parameters", "steps", "seconds", "bits/char dev", "test")]
    for result in results:
        rows.append(
            (
                TITLES[result.kind],
                f"{result.parameters:,}",
                "-" if result.steps is None else str(result.steps),
                "-" if result.seconds is None else f"{result.seconds:.0f}",
                f"{result.dev:.4f}",
                "-" if result.test is None else f"{result.test:.4f}",
            )
        )
    table = f"{aligned(rows)}\n{vocab_size} ids: {math.log2(vocab_size):.4f} bits/char without any knowledge"
    samples = [f"sample of {TITLES[one.kind]}:\n{one.sample}" for one in results if one.sample is not None]
    return "\n\n".join([table, *samples])


def format_line(line: Line) -> str:
    """One evaluation, as it is told while training."""
    return (
        f"phase {line.phase} step {line.step}: {TITLES[line.kind]}, bits/char {line.train:.4f} in training, "
        f"{line.dev:.4f} on dev, {line.seconds:.0f} s"
    )


def count_configs(configs: Sequence[str] = tuple(PRESETS)) -> list[dict[str, Any]]:
    """Parameters of both models in the paper's configs, with the millions of Table 2."""
    return [
        {
            "config": config,
            "kind": kind,
            "parameters": count_of(kind, size_of(config), VOCABULARY_OF_MEASURING),
            "published": PRESETS[config].published.parameters if kind == "long_short" else None,
        }
        for config in configs
        for kind in KINDS
    ]


def format_counts(counts: Sequence[dict[str, Any]]) -> str:
    """A table of :func:`count_configs`."""
    rows = [("config", "model", "parameters", "Table 2")]
    for count in counts:
        published = "-" if count["published"] is None else f"{count['published']}M"
        rows.append((count["config"], TITLES[count["kind"]], f"{count['parameters']:,}", published))
    return aligned(rows)


def format_costs(costs: Sequence[Cost], parameters: dict[str, int]) -> str:
    """A table of seconds and memory by length, the models side by side."""
    kinds = list(dict.fromkeys(cost.kind for cost in costs))
    rows = [("length", *(f"{TITLES[kind]} {unit}" for kind in kinds for unit in ("seconds", "MB")))]
    for length in dict.fromkeys(cost.length for cost in costs):
        found = {cost.kind: cost for cost in costs if cost.length == length}
        cells = []
        for kind in kinds:
            cost = found[kind]
            cells.append("out of memory" if cost.is_out else f"{cost.seconds:.3f}")
            cells.append("-" if cost.memory is None else f"{cost.memory / 1e6:.0f}")
        rows.append((str(length), *cells))
    said = ", ".join(f"{TITLES[kind]} {parameters[kind]:,} parameters" for kind in kinds)
    return f"{said}; a step on a part and a memory of as many bytes\n{aligned(rows)}"


def as_json(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Dataclasses as dicts."""
    return [asdict(value) for value in values]
