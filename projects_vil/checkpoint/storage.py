"""The checkpoint files of a run: the one to resume from, those to remove, and a copy without training state."""

import logging
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write, check_writable, read_checkpoint, write_checkpoint
from projects_vil.checkpoint.metadata import METADATA_KEY

LAST_CHECKPOINT, BEST_CHECKPOINT = "last_checkpoint", "model_best.pth"
PUBLISHED_WEIGHTS = "model.safetensors"
_logger = logging.getLogger(__name__)


def checkpoints_of(folder: str | Path) -> list[Path]:
    """Return the checkpoints that training can resume from, newest first; the best checkpoint is not among them."""
    files = [path for path in Path(folder).glob("model_*.pth") if path.is_file() and path.name != BEST_CHECKPOINT]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def last_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, the last one first; the best checkpoint is not among them.

    The last one is the file that ``last_checkpoint`` names. Without that the iterations decide, since a copied folder
    has other modification times.
    """
    files, tag = checkpoints_of(folder), Path(folder) / LAST_CHECKPOINT
    name = tag.read_text(errors="replace").strip() if tag.is_file() else ""
    if name and Path(name).name == name and os.path.isfile(tag.parent / name):
        return [tag.parent / name, *(path for path in files if path.name != name)]
    if len(files) > 1:
        _logger.warning("%s names no checkpoint of its folder (%r): using the newest complete one", tag, name[:80])
        files.sort(key=_iteration, reverse=True)
    return files


def weights_of(run: str | Path) -> Path | None:
    """Return the weights of a run: its last checkpoint, or else the best one; or those of a published folder."""
    others = [Path(run) / name for name in (BEST_CHECKPOINT, PUBLISHED_WEIGHTS)]
    return next(iter([*last_checkpoints(run), *(path for path in others if path.is_file())]), None)


def read_last_checkpoint(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Find and read the checkpoint to resume from, so that a resume reads the file once.

    It is the last one that is complete; the log names those that are skipped, and why.

    Args:
        folder: OUTPUT_DIR of a run.

    Returns:
        The path and its contents; None without any checkpoint.

    Raises:
        ConfigError: if no checkpoint of the folder can be resumed from, or ``last_checkpoint`` names a missing file
            and there is no other.
    """
    candidates, tag = last_checkpoints(folder), Path(folder) / LAST_CHECKPOINT
    for path in candidates:
        try:
            contents = read_checkpoint(path)
        except ConfigError as error:
            _logger.warning("skipped: %s", error)
            continue
        trainer = contents.get("trainer")
        if isinstance(trainer, dict) and type(trainer.get("iteration")) is int:
            return path, contents
        _logger.warning("skipped: %s has no training state, with its iteration, to resume from", path)
    if candidates:
        raise ConfigError(
            f"none of the {len(candidates)} checkpoints in {folder} can be resumed from; remove them to start again, "
            "or choose another OUTPUT_DIR"
        )
    if tag.is_file():
        raise ConfigError(f"{tag} names a missing file, and {folder} has no checkpoint: remove {tag} to start again")
    return None


def tag_checkpoint(folder: str | Path, name: str) -> None:
    """Write the name of a file into ``last_checkpoint``; raises ConfigError if it cannot be written."""
    with atomic_write(Path(folder) / LAST_CHECKPOINT) as partial:
        partial.write_text(name)


def remove_old(folder: str | Path, *, keep: int) -> None:
    """Remove all but the ``keep`` newest numbered checkpoints (``model_0000999.pth``); at least one is kept."""
    numbered = [path for path in checkpoints_of(folder) if path.stem.removeprefix("model_").isdecimal()]
    for path in numbered[max(keep, 1) :]:
        path.unlink(missing_ok=True)


def remove_run(folder: str | Path) -> None:
    """Remove the checkpoints of an earlier run, so that the next run never resumes from one of them."""
    for path in (Path(folder) / LAST_CHECKPOINT, *checkpoints_of(folder), Path(folder) / BEST_CHECKPOINT):
        path.unlink(missing_ok=True)


def remove_partial(folder: str | Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote."""
    for path in Path(folder).glob(".*.partial"):
        path.unlink(missing_ok=True)


def slim_checkpoint(source: str | Path, output: str | Path) -> list[str]:
    """Write a detector's weights and metadata without optimizer, scheduler and trainer state.

    The file is for ``MODEL.WEIGHTS``, evaluation and export; training cannot resume from it.

    Args:
        source: a ``.pth`` or ``.safetensors`` checkpoint of this project or of detectron2.
        output: ``.pth`` or ``.safetensors``; an existing file is replaced, unless it is the source.

    Returns:
        A report: the sizes of both files and the keys that were left out.

    Raises:
        ConfigError: if the source cannot be read, is not a detector's checkpoint or is ``output``, or if the output
            cannot be written.
    """
    source, output = Path(source), Path(output)
    check_writable(output)
    if source.exists() and output.exists() and source.samefile(output):
        raise ConfigError(f"output {output} is the source: choose another file")
    contents = read_checkpoint(source)
    model = contents.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ConfigError(f"{source} is not a detectron2 checkpoint: it has no state dict of tensors under 'model'")
    kept = {key: value for key, value in contents.items() if key in ("model", METADATA_KEY)}
    write_checkpoint(output, kept)
    before, after = (path.stat().st_size / 1e6 for path in (source, output))
    removed = ", ".join(sorted(str(key) for key in contents.keys() - kept.keys())) or "nothing"
    lines = [f"{before:.1f} MB before, {after:.1f} MB now; left out: {removed}"]
    if METADATA_KEY not in contents:
        lines.append("the file has no metadata (variant, classes, input format)")
    return lines


def _iteration(path: Path) -> int:
    """Return the iteration in a file's name, or else in its contents; -1 for a file that cannot be read."""
    number = path.stem.removeprefix("model_")
    if number.isdecimal():
        return int(number)
    try:
        iteration = read_checkpoint(path).get("iteration")
    except ConfigError:
        return -1
    return iteration if type(iteration) is int else -1
