"""What the tool can be asked for, each as one call that prints and returns what --json keeps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backbones.utils.errors import InputError
from projects_vil.sequence.char_lm.checkpoints import best_path, load_trained
from projects_vil.sequence.char_lm.measuring import VOCABULARY_OF_MEASURING, Cost, measure_steps
from projects_vil.sequence.char_lm.models.build import KINDS, count_of
from projects_vil.sequence.char_lm.models.presets import ModelSize
from projects_vil.sequence.char_lm.results import (
    TITLES,
    Sampling,
    as_json,
    bits_on_test,
    count_configs,
    draw_sample,
    format_costs,
    format_counts,
    format_line,
    format_results,
    judge,
)
from projects_vil.sequence.char_lm.texts.text import read_text
from projects_vil.sequence.char_lm.training import MOST_SEEDS, Settings, Training

# Where a prompt is not given.
DEFAULT_PROMPT = "\n"
# Figure 3 ends where the memory of its GPU does.
LENGTHS = (512, 1024, 2048, 4096, 8192)


def train_and_test(
    settings: Settings,
    *,
    data: str,
    output: str,
    device: str = "cpu",
    resume: bool = False,
    sampling: Sampling | None = None,
    testing: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Train, and judge the weights that were the best on dev.

    Args:
        data: the text's file.
        output: folder of the run.
        sampling: of the sample at the end; None for none.
        testing: ``memory_length``, ``length`` and ``num_streams`` of :func:`bits_on_test`; None for those of training.

    Raises:
        InputError: as :class:`Training`, and, before the work, for a sample or a test that cannot be.
    """
    text = read_text(data)
    testing = checked_testing(testing or {}, settings.size)
    if sampling is not None:
        check_sampling(sampling)
        text.vocabulary.encode_prompt(sampling.prompt)
    training = Training(settings, text, Path(output), device=device, resume=resume)
    print(
        f"{data}: {len(text.train):,} bytes to train on, {len(text.dev) - 1:,} to choose by, {len(text.test) - 1:,} to "
        f"test; {len(text.vocabulary)} ids",
        flush=True,
    )
    training.run(lambda line: print(format_line(line), flush=True))
    steps, results = sum(phase.steps for phase in settings.phases), []
    for kind in settings.kinds:
        trained = load_trained(best_path(training.output, kind))
        bits = bits_on_test(trained, text, device=device, **testing)
        results.append(judge(trained, test=bits, sampling=sampling, lines=training.lines, steps=steps, device=device))
    print(f"\n{format_results(results, len(text.vocabulary))}")
    return {
        "settings": asdict(settings),
        "vocabulary": len(text.vocabulary),
        "history": as_json(training.lines),
        "results": as_json(results),
    }


def generate_from_file(weights: str, sampling: Sampling, *, device: str = "cpu") -> dict[str, Any]:
    """Print a sample of a trained model.

    Raises:
        InputError: for a file that is no model, and a prompt with unknown bytes.
    """
    check_sampling(sampling)
    sample = draw_sample(load_trained(weights), sampling, device=device)
    print(sample)
    return {"weights": weights, "sample": sample, **asdict(sampling)}


def evaluate_file(weights: str, data: str, *, device: str = "cpu", testing: Mapping[str, int | None]) -> dict[str, Any]:
    """Print a trained model's bits per character on the test part of a text.

    Args:
        testing: as of :func:`train_and_test`.
    """
    trained = load_trained(weights)
    testing = checked_testing(testing, trained.size)
    text = read_text(data, vocabulary=trained.vocabulary)
    bits = bits_on_test(trained, text, device=device, **testing)
    memory = testing.get("memory_length", trained.memory_length)
    length = testing.get("length", trained.length)
    print(
        f"{TITLES[trained.kind]}: {bits:.4f} bits/char on {len(text.test) - 1:,} bytes of {data}, in parts of {length} "
        f"with a memory of {memory}"
    )
    return {"weights": weights, "test": bits, "length": length, "memory_length": memory}


def measure_config(
    size: ModelSize,
    lengths: Sequence[int] | None = None,
    *,
    batch_size: Sequence[int] | None = None,
    runs: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Print seconds and memory of a step by length, and parameters beside those of the paper.

    Args:
        lengths: ``LENGTHS`` without them.
        batch_size: one number; 1 without it.
        runs: how often a step is timed; 5 times without it.

    Raises:
        InputError: for a length or a number that cannot be.
    """
    lengths, runs = LENGTHS if lengths is None else lengths, 5 if runs is None else runs
    if batch_size is not None and len(batch_size) != 1:
        raise InputError(f"--batch-size has {len(batch_size)} values: --measure takes one")
    batch_size = 1 if batch_size is None else batch_size[0]
    for name, value in (("--runs", runs), ("--batch-size", batch_size)):
        if value < 1:
            raise InputError(f"{name} {value}: it is 1 or more")
    for length in lengths:
        if length < size.window_size or length % size.segment_length:
            raise InputError(
                f"--lengths {length}: it is a multiple of --segment {size.segment_length}, and no less than --window "
                f"{size.window_size}"
            )
    costs = measure_steps(KINDS, size, lengths, batch_size=batch_size, runs=runs, device=device, told=_tell)
    parameters = {kind: count_of(kind, size, VOCABULARY_OF_MEASURING) for kind in KINDS}
    counts = count_configs()
    print(f"{format_costs(costs, parameters)}\n\n{format_counts(counts)}")
    return {
        "size": asdict(size),
        "batch_size": batch_size,
        "device": device,
        "parameters": parameters,
        "costs": as_json(costs),
        "configs": counts,
    }


def _tell(cost: Cost) -> None:
    seconds = "out of memory" if cost.is_out else f"{cost.seconds:.3f} s"
    print(f"length {cost.length}, {TITLES[cost.kind]}: {seconds}", flush=True)


def checked_testing(testing: Mapping[str, int | None], size: ModelSize) -> dict[str, int]:
    """Those of :func:`bits_on_test`'s options that are given.

    Raises:
        InputError: for a number that cannot be.
    """
    said = {"memory_length": "--test-memory", "length": "--test-part", "num_streams": "--test-streams"}
    given = {name: value for name, value in testing.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise InputError(f"{said[name]} {value}: it is 1 or more")
    memory_length = given.get("memory_length")
    if memory_length is not None and (memory_length % size.segment_length or memory_length < size.window_size):
        raise InputError(
            f"--test-memory {memory_length}: it is a multiple of the segment, {size.segment_length}, and no less than "
            f"the window, {size.window_size}"
        )
    return given


def check_sampling(sampling: Sampling) -> None:
    """Raise an :class:`InputError` for a sample that cannot be drawn."""
    if sampling.number < 1:
        raise InputError(f"--sample {sampling.number}: it is 1 or more")
    if not 0 < sampling.temperature < math.inf:
        raise InputError(f"--temperature {sampling.temperature}: it is above 0")
    if not 0 <= sampling.seed < MOST_SEEDS:
        raise InputError(f"--seed {sampling.seed}: it is from 0 to {MOST_SEEDS - 1}")
