"""What a format is: its file, what it needs here, how it is written and how it is run."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from backbones import InputError
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.stages import Stages
from projects_vil.modeling import LARGEST_BATCH, LARGEST_SIDE, SMALLEST_SIDE

Run = Callable[[Tensor], "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Format:
    """A format that a detector is exported in.

    Attributes:
        suffix: that its files end with.
        check: raises an :class:`InputError` where this machine cannot write and run it.
        write: a detector, an example of its input, the file and the stages of the work; the type of the example,
            uint8 or float32, is what a file takes.
        load: a file -> what runs it: an input to the outputs, in the order of the detector's.
        packages: whose versions are said of a file.
        sides: the shortest and the longest, in pixels, of an image that a file takes, whatever the detector.
        largest_batch: that a batched file takes.
        needs_fixed_detections: whether what comes out must have a shape that the image does not decide.
        describe: a file -> what its report says of it beyond what all formats have; raises an :class:`InputError` for
            one that other programs would refuse.
        beside: the ends of the names of further files that belong to a model, in place of ``suffix``.
        options: of the runtime, which it is to run a file with.
        quantize: a file in float32, the one to be written, images as the model takes them, and the stages: writes it
            in int8. None where there is none. Both files are of ``source``, where there is one.
        source: the format of the file that one of this is built of; None where it is written at once.
        build: a detector, a file of ``source``, the one to be written, and the stages.
        quantizing_packages: that it needs.
        built_for: what of this machine a file is bound to, by its name; where another is, it is refused.
        refused: precisions that it does not have, and why.
    """

    suffix: str
    check: Callable[[], None]
    write: Callable[[ExportableDetector, Tensor, Path, Stages], None]
    load: Callable[[Path], Run]
    packages: tuple[str, ...] = ()
    sides: tuple[int, int] = (SMALLEST_SIDE, LARGEST_SIDE)
    largest_batch: int = LARGEST_BATCH
    needs_fixed_detections: bool = False
    describe: Callable[[Path], dict] = lambda path: {}
    beside: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    quantize: Callable[[Path, Path, Sequence[Tensor], Stages], None] | None = None
    source: "Format | None" = None
    build: Callable[[ExportableDetector, Path, Path, Stages], None] | None = None
    quantizing_packages: tuple[str, ...] = ()
    built_for: Callable[[], dict[str, str]] = dict
    refused: Mapping[str, str] = field(default_factory=dict)

    def files(self, path: Path) -> list[Path]:
        """The files of a model, from the one that it is named by."""
        stem = str(path).removesuffix(self.suffix)
        return [path, *(Path(stem + suffix) for suffix in self.beside)]


def check_packages(asked: str, packages: Sequence[str]) -> None:
    """Raise an :class:`InputError` where one of the packages is missing that an argument, ``asked``, needs."""
    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise InputError(f"{asked} needs {name}: pip install {' '.join(packages)}") from error


@contextlib.contextmanager
def damaged(path: Path, *kinds: type[Exception], reason_last: bool = False) -> Iterator[None]:
    """What a runtime raises of a file that it cannot load, in one line: its first, or its last if that says why."""
    try:
        yield
    except kinds as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1 if reason_last else 0]
        raise InputError(f"cannot load {path}: {reason}") from error
