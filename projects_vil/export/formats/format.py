"""What a format is: its file, what it needs here, how it is written and how it is run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@contextlib.contextmanager
def damaged(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """What a runtime raises of a file that it cannot load, as one line."""
    try:
        yield
    except kinds as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot load {path}: {reason}") from error
