"""What a check has found: how often, where, and the first examples."""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from backbones import InputError
from projects_vil.data.checking.kinds import KINDS, LEVELS, NOT_TO_MEND, Kind, Level

EXAMPLES = 5
# That the one line of an error names.
_KINDS_IN_A_LINE = 3
_LONGEST_VALUE = 80


class Findings:
    """Faults of one COCO file.

    Args:
        annotations: the file.
        image_root: the folder of its images.
        masks: False where segmentations are not looked at.

    Attributes:
        places: of each kind, indices in the file's list of images, annotations or categories.
        examples: of each kind, the first: what it is, and ids and file names where they are known.
        numbers: of images, annotations and categories.
    """

    def __init__(self, annotations: str | Path, image_root: str | Path, *, masks: bool = True) -> None:
        self.annotations, self.image_root, self.masks = str(annotations), str(image_root), masks
        self.places: dict[str, list[int]] = defaultdict(list)
        self.examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.numbers: dict[str, int] = {}

    def add(self, kind: str, index: int, describe: Callable[[], dict[str, Any]]) -> None:
        """One more fault; ``describe`` is called for the first of a kind."""
        assert kind in KINDS, kind
        places = self.places[kind]
        places.append(index)
        if len(places) <= EXAMPLES:
            self.examples[kind].append(describe())

    def kinds(self, level: Level | None = None) -> Iterator[Kind]:
        """Those that were found, the worst first."""
        for name in LEVELS if level is None else (level,):
            yield from (kind for kind in KINDS.values() if kind.level == name and self.places.get(kind.name))

    def count(self, level: Level) -> int:
        return sum(len(self.places[kind.name]) for kind in self.kinds(level))

    def line(self, kind: Kind) -> str:
        """A kind with its number, first example and what becomes of it."""
        number = len(self.places[kind.name])
        return f"{kind.counted(number)}: {kind.training} ({_told(self.examples[kind.name][0])})"

    def lines(self) -> list[str]:
        """All that was found, for a console."""
        numbers = ", ".join(f"{number:,} {what}" for what, number in self.numbers.items())
        lines = [f"{self.annotations}: {numbers}"]
        for kind in self.kinds():
            places = self.places[kind.name]
            lines.append(f"{kind.level}: {kind.counted(len(places))}")
            lines += [f"    {_told(example)}" for example in self.examples[kind.name]]
            if len(places) > EXAMPLES:
                lines.append(f"    and {len(places) - EXAMPLES:,} more")
            with_warn = "with DATASETS.CHECK warn: " if kind.level == "error" else "in training: "
            lines.append(f"    {with_warn}{kind.training}; in a copy by --fix: {kind.copy}")
        return lines

    def unmendable(self) -> Kind | None:
        """The first kind that was found and that neither a copy nor ``DATASETS.CHECK warn`` does away with."""
        return next((kind for kind in self.kinds("error") if kind.name in NOT_TO_MEND), None)

    def error(self) -> InputError:
        """One line with the worst of it and the ways out; of what cannot be mended, about that alone."""
        if (kind := self.unmendable()) is not None:
            return InputError(
                f"{self.annotations} is a {kind.one} ({_told(self.examples[kind.name][0])}), which {kind.copy}; where "
                "that is a false alarm, DATASETS.CHECK off trains on them as they are"
            )
        kinds = list(self.kinds("error"))
        told = [
            f"{kind.counted(len(self.places[kind.name]))} ({_told(self.examples[kind.name][0])})"
            for kind in kinds[:_KINDS_IN_A_LINE]
        ]
        if len(kinds) > _KINDS_IN_A_LINE:
            told.append(f"{len(kinds) - _KINDS_IN_A_LINE} more kinds of faults")
        paths = shlex.join([self.annotations, self.image_root])
        return InputError(
            f"{self.annotations} has {'; '.join(told)}: python tools/check_dataset.py {paths}"
            f"{'' if self.masks else ' --boxes'} lists all, and with --fix OUT writes a copy without them; "
            "DATASETS.CHECK warn goes on without them"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "annotations": self.annotations,
            "image_root": self.image_root,
            "numbers": self.numbers,
            "passed": not self.count("error"),
            "found": [
                {
                    "kind": kind.name,
                    "level": kind.level,
                    "count": len(self.places[kind.name]),
                    "what": kind.what,
                    "training": kind.training,
                    "copy": kind.copy,
                    "examples": self.examples[kind.name],
                }
                for kind in self.kinds()
            ],
        }


def shown(value: object) -> str:
    """A value of the file, without its middle where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE // 2]} ... {text[-_LONGEST_VALUE // 4 :]}"


def _told(example: dict[str, Any]) -> str:
    """``annotation 17 of image 3, a.jpg: [nan, 1, 2, 3]``."""
    parts = [f"{what} {shown(example[what])}" for what in ("annotation", "category", "image") if what in example]
    told = " of ".join(parts) + (f", {example['file']}" if "file" in example else "")
    value = example.get("value")
    return told if value is None else f"{told}: {value}" if told else str(value)
