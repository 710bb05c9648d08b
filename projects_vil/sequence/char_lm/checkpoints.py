"""What is kept of a training: the best weights of each model, and all that the next step needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backbones.utils.errors import InputError
from backbones.utils.files import read_checkpoint, write_checkpoint
from projects_vil.sequence.char_lm.models.build import KINDS, create_model
from projects_vil.sequence.char_lm.models.presets import ModelSize
from projects_vil.sequence.char_lm.texts.text import Vocabulary

LAST = "last.pth"
# Of a run's settings, those that are called otherwise on a command line.
_ARGUMENTS = {"kinds": "what trains (--compare)", "phases": "the number of phases (of --steps)"}
_DESCRIPTION = "char_lm"


def best_path(folder: Path, kind: str) -> Path:
    """Where the weights lie that were the best on dev."""
    return folder / f"best_{kind}.pth"


@dataclass(frozen=True)
class Trained:
    """A model with its weights.

    Attributes:
        length: bytes of a part that it was trained on last.
        memory_length: bytes that it saw before a part.
        facts: what else the file says: the step, and bits per character on dev.
    """

    kind: str
    size: ModelSize
    vocabulary: Vocabulary
    length: int
    memory_length: int
    weights: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]

    def build(self, *, memory_length: int | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """The model, with a memory of the length it was trained with, or of another one."""
        length = self.memory_length if memory_length is None else memory_length
        model = create_model(self.kind, self.size, vocab_size=len(self.vocabulary), memory_length=length)
        _load(model, self.weights, self.kind)
        return model.to(device).eval()


def save_trained(path: Path, trained: Trained) -> None:
    """Write a model with all that is needed to use it.

    Raises:
        InputError: where it cannot be written; what lay there before is still there.
    """
    description = {
        "kind": trained.kind,
        "size": asdict(trained.size),
        "vocabulary": trained.vocabulary.known,
        "length": trained.length,
        "memory_length": trained.memory_length,
        "facts": dict(trained.facts),
    }
    write_checkpoint(path, {"model": trained.weights, _DESCRIPTION: description})


def load_trained(path: str | Path) -> Trained:
    """A model that :func:`save_trained` wrote.

    Raises:
        InputError: for a file that is missing, damaged, or none of these.
    """
    contents = read_checkpoint(path)
    said = contents.get(_DESCRIPTION)
    if not isinstance(said, Mapping):
        raise InputError(f"{path} is no character model: name a best_*.pth of tools/train_char_lm.py")
    if "kind" not in said:
        raise InputError(f"{path} is the state of a run, for --resume: name a best_*.pth beside it")
    try:
        trained = Trained(
            kind=said["kind"],
            size=ModelSize(**said["size"]),
            vocabulary=Vocabulary(said["vocabulary"]),
            length=said["length"],
            memory_length=said["memory_length"],
            weights=contents["model"],
            facts=said["facts"],
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} says too little of its model: take another file") from error
    if trained.kind not in KINDS:
        raise InputError(f"{path} is of an unknown model {trained.kind!r}: take another file")
    return trained


def save_run(
    path: Path, models: Mapping[str, nn.Module], settings: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Write all that the next step of a run needs.

    Args:
        models: by kind.
        settings: of the run, compared when it is resumed.
        state: whatever else; tensors, numbers, texts, lists and dicts.
    """
    weights = {f"{kind}/{name}": value for kind, model in models.items() for name, value in model.state_dict().items()}
    write_checkpoint(path, {"model": weights, _DESCRIPTION: {"settings": dict(settings)}, "trainer": dict(state)})


def read_run(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Weights by kind, and the state, as :func:`save_run` wrote them.

    Raises:
        InputError: for a file that is none, or is of a run with other settings, which are named.
    """
    contents = read_checkpoint(path)
    said = contents.get(_DESCRIPTION)
    if not isinstance(said, Mapping) or "settings" not in said or "trainer" not in contents:
        raise InputError(f"{path} is not the state of a run of tools/train_char_lm.py: choose another --output")
    for name, value in settings.items():
        before = said["settings"].get(name)
        if before != value:
            said = _ARGUMENTS.get(name, name)
            raise InputError(
                f"--resume: {said} was {before} in {path} and is {value} now: run with what it was, or begin anew in "
                "another --output"
            )
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in contents["model"].items():
        kind, _, rest = name.partition("/")
        weights.setdefault(kind, {})[rest] = value
    return weights, contents["trainer"]


def _load(model: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise InputError(f"the weights of {what} do not fit the size that the file says: {line[:200]}") from error
