"""The paper's configs by the names of the tool, and how a small run departs from one. Sizes and phases stand in
:mod:`backbones.sequence.variants`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backbones.sequence.variants import CHAR_LMS, CharLMSizes, Phase
from backbones.utils.errors import InputError, check_choice

_FIRST = CHAR_LMS["enwik8_small"].sizes


@dataclass(frozen=True)
class ModelSize:
    """Of both models; what concerns the window and the projection is for the long-short one alone.

    Attributes:
        dim: channels of a byte.
        hidden_dim: channels inside the MLPs.
        depth: layers.
        window_size: bytes of a window.
        segment_length: bytes that are projected together.
        rank: projected keys of a segment.
    """

    dim: int
    num_heads: int
    hidden_dim: int
    depth: int
    window_size: int = _FIRST.window_size
    segment_length: int = _FIRST.segment_length
    rank: int = _FIRST.rank


@dataclass(frozen=True)
class Published:
    """Transformer-LS in Table 2, on enwik8; None for what the table leaves out.

    Attributes:
        parameters: in millions.
        dev: bits per character; that of test stands with the variant.
    """

    parameters: int
    dev: float | None


@dataclass(frozen=True)
class Preset:
    """A config by name: the variant that has its sizes and phases, and the figures of the paper."""

    variant: str
    published: Published


PRESETS = {
    "small": Preset("enwik8_small", Published(parameters=44, dev=1.01)),
    "large": Preset("enwik8_large", Published(parameters=110, dev=None)),
}
# The published evaluation as it can be run, launch/run-eval.sh: a memory of 32768 bytes, in parts of 256.
PUBLISHED_TEST_MEMORY, PUBLISHED_TEST_PART = 32_768, 256
# Adam as fairseq, which the scripts call, has it by default; its weight decay is decoupled, and acts on all parameters.
BETAS, EPSILON = (0.9, 0.999), 1e-8

# What a command line may say instead of a config.
_OF_SIZE = {
    "dim": "dim",
    "heads": "num_heads",
    "hidden": "hidden_dim",
    "layers": "depth",
    "window": "window_size",
    "segment": "segment_length",
    "rank": "rank",
}
_OF_PHASES = {"length": "length", "steps": "steps", "warm_up": "warmup_steps", "rate": "learning_rate"}
_OF_PHASES |= {"batch_size": "batch_size"}


def size_of(config: str, **overrides: int | None) -> ModelSize:
    """The size of a config, with other values where they are not None.

    Args:
        config: a key of ``PRESETS``.
        overrides: ``dim``, ``heads``, ``hidden``, ``layers``, ``window``, ``segment``, ``rank``; without ``hidden`` the
            MLPs have as many times ``dim`` as the config's.

    Raises:
        InputError: for an unknown config, and for a number below 1.
    """
    sizes = _sizes_of(config)
    given = {_OF_SIZE[name]: value for name, value in overrides.items() if value is not None}
    for name, value in overrides.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: it is 1 or more")
    if "dim" in given and "hidden_dim" not in given:
        given["hidden_dim"] = given["dim"] * sizes.hidden_dim // sizes.dim
    return ModelSize(**{name: given.get(name, getattr(sizes, name)) for name in _OF_SIZE.values()})


def phases_of(config: str, **overrides: Sequence[Any] | None) -> tuple[Phase, ...]:
    """The phases of a config, with other values where they are not None.

    Args:
        config: a key of ``PRESETS``.
        overrides: ``length``, ``steps``, ``warm_up``, ``rate``, ``batch_size``: a value for each phase, or one for all.
            As many ``steps`` as are given, so many phases are trained. Without ``warm_up`` each has the same share of
            other ``steps`` as in the config.

    Raises:
        InputError: for an unknown config, another number of values, and values that cannot be.
    """
    check_choice("config", config, PRESETS)
    phases = CHAR_LMS[PRESETS[config].variant].phases
    steps = overrides.get("steps")
    if steps is not None:
        if len(steps) > len(phases):
            raise InputError(f"--steps has {len(steps)} values, and {config} has {len(phases)} phases: give no more")
        phases = phases[: len(steps)]
    changed = []
    for index, phase in enumerate(phases):
        given = {}
        for name, values in overrides.items():
            if values is None:
                continue
            option = f"--{name.replace('_', '-')}"
            if len(values) not in (1, len(phases)):
                raise InputError(
                    f"{option} has {len(values)} values for {len(phases)} phases: give one, or one for each"
                )
            value = values[index if len(values) > 1 else 0]
            bounds = {"warm_up": "0 or more", "rate": "above 0 and at most 1"}.get(name, "above 0")
            most = 1.0 if name == "rate" else math.inf
            if not (0 < value <= most and value < math.inf) and not (value == 0 and name == "warm_up"):
                raise InputError(f"{option} {value}: it is {bounds}")
            given[_OF_PHASES[name]] = value
        if "steps" in given and "warmup_steps" not in given:
            given["warmup_steps"] = phase.warmup_steps * given["steps"] // phase.steps
        changed.append(replace(phase, **given))
    return tuple(changed)


def _sizes_of(config: str) -> CharLMSizes:
    check_choice("config", config, PRESETS)
    return CHAR_LMS[PRESETS[config].variant].sizes


def dropout_of(config: str) -> float:
    """The config's rate."""
    return CHAR_LMS[PRESETS[config].variant].dropout


def weight_decay_of(config: str) -> float:
    """The config's weight decay."""
    return CHAR_LMS[PRESETS[config].variant].weight_decay
