"""Checkpoints without what only a resumed training needs."""

import dataclasses
from pathlib import Path

from torch import Tensor

from backbones import InputError
from backbones.convert import recognise
from backbones.utils.files import check_writable, read_checkpoint, write_checkpoint
from projects_vil.checkpoint.provenance import PROVENANCE_KEY

_MEGABYTE = 1e6


@dataclasses.dataclass(frozen=True)
class Slimmed:
    """What :func:`slim_checkpoint` did.

    Attributes:
        source_bytes, output_bytes: of the two files.
        values: numbers that the model has, buffers included.
        left_out: the keys of the source that are not in the output.
        has_provenance: whether the source says what it is.
    """

    source_bytes: int
    output_bytes: int
    values: int
    left_out: tuple[str, ...]
    has_provenance: bool

    def lines(self) -> list[str]:
        before, after = (size / _MEGABYTE for size in (self.source_bytes, self.output_bytes))
        lines = [
            f"{before:.1f} MB before, {after:.1f} MB now: {self.values / 1e6:.2f} M values; "
            f"left out: {', '.join(self.left_out) or 'nothing, there was only the model'}"
        ]
        if not self.has_provenance:
            lines.append("the file does not say its variant, classes and input format: it was not written here")
        return lines


def slim_checkpoint(source: str | Path, output: str | Path) -> Slimmed:
    """Write the model of a detector's checkpoint, and what the file says of itself, without optimizer, scheduler and
    trainer: for ``MODEL.WEIGHTS``, evaluation and export, but not to resume from.

    Args:
        source: a ``.pth`` or ``.safetensors`` file that this project or detectron2 trained.
        output: ``.pth`` or ``.safetensors``; a file there is replaced, unless it is the source.

    Raises:
        InputError: for a source that cannot be read, is no checkpoint of a detector or is ``output``, or an output
            that cannot be written.
    """
    source, output = Path(source), Path(output)
    check_writable(output)
    if source.exists() and output.exists() and source.samefile(output):
        raise InputError(f"{output} is the source: name another file, or nothing could be resumed from it any more")
    contents = read_checkpoint(source)
    official = recognise(contents)
    if official is not None:
        raise InputError(f"{source} is of {official.kind}: tools/convert_checkpoint.py takes it")
    model = contents.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise InputError(f"{source} is no checkpoint that this project trained: it has no model of tensors only")
    kept = {key: value for key, value in contents.items() if key in ("model", PROVENANCE_KEY)}
    write_checkpoint(output, kept)
    return Slimmed(
        source_bytes=source.stat().st_size,
        output_bytes=output.stat().st_size,
        values=sum(tensor.numel() for tensor in model.values()),
        left_out=tuple(sorted(str(key) for key in contents.keys() - kept.keys())),
        has_provenance=PROVENANCE_KEY in contents,
    )
