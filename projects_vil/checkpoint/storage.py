"""The checkpoint files of a run: the one to resume from, those to remove, and a copy without training state."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write, check_writable, read_checkpoint, write_checkpoint
from backbones.convert import recognise
from projects_vil.checkpoint.metadata import METADATA_KEY

LAST_CHECKPOINT, BEST_CHECKPOINT = "last_checkpoint", "model_best.pth"


def checkpoints_of(folder: str | Path) -> list[Path]:
    """Return the checkpoints that training can resume from, newest first; the best checkpoint is not among them."""
    files = [path for path in Path(folder).glob("model_*.pth") if path.is_file() and path.name != BEST_CHECKPOINT]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def read_last_checkpoint(
    folder: str | Path, *, logger: logging.Logger | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Find and read the checkpoint to resume from, so that a resume reads the file once.

    It is the file that ``last_checkpoint`` names, or else the newest one that is complete.

    Args:
        folder: OUTPUT_DIR of a run.
        logger: logs which files are skipped, and why.

    Returns:
        The path and its contents, for ``Checkpointer.load(path, contents=...)``; None without any checkpoint.

    Raises:
        ConfigError: if no checkpoint of the folder can be resumed from, or ``last_checkpoint`` names a missing file
            and there is no other.
    """
    logger = logger or logging.getLogger(__name__)
    candidates = checkpoints_of(folder)
    tag = Path(folder) / LAST_CHECKPOINT
    name = tag.read_text(errors="replace").strip()[:80] if tag.is_file() else ""
    named = next((path for path in Path(folder).glob("*") if path.name == name and path.is_file()), None)
    if named is not None:
        candidates = [named, *(path for path in candidates if path != named)]
    elif candidates:
        # A copied folder has other modification times.
        candidates.sort(key=_iteration, reverse=True)
        logger.warning("%s names no checkpoint of its folder (%r): using the newest complete one", tag, name)
    for path in candidates:
        try:
            contents = read_checkpoint(path)
        except ConfigError as error:
            logger.warning("skipped: %s", error)
            continue
        if "trainer" in contents:
            return path, contents
        logger.warning("skipped: %s has no training state to resume from", path)
    if candidates:
        raise ConfigError(
            f"none of the {len(candidates)} checkpoints in {folder} can be resumed from; remove them to start again, "
            "or choose another OUTPUT_DIR"
        )
    if name:
        raise ConfigError(f"{tag} names {name}, and {folder} has no checkpoint: remove {tag} to start again")
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
    (Path(folder) / LAST_CHECKPOINT).unlink(missing_ok=True)
    for path in (*checkpoints_of(folder), Path(folder) / BEST_CHECKPOINT):
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
    official = recognise(contents)
    if official is not None:
        raise ConfigError(f"{source} is of {official.project}: convert it with tools/convert_checkpoint.py")
    model = contents.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ConfigError(f"{source} is not a detectron2 checkpoint: it has no state dict of tensors under 'model'")
    kept = {key: value for key, value in contents.items() if key in ("model", METADATA_KEY)}
    write_checkpoint(output, kept)
    values = sum(tensor.numel() for tensor in model.values())
    before, after = (path.stat().st_size / 1e6 for path in (source, output))
    removed = ", ".join(sorted(str(key) for key in contents.keys() - kept.keys())) or "nothing"
    lines = [f"{before:.1f} MB before, {after:.1f} MB now: {values / 1e6:.2f} M values; left out: {removed}"]
    if METADATA_KEY not in contents:
        lines.append("the file has no metadata (variant, classes, input format)")
    return lines


def _iteration(path: Path) -> float:
    """Return the iteration in a file's name, or else in its contents; -1 for a file that cannot be read."""
    number = path.stem.removeprefix("model_")
    if number.isdecimal():
        return int(number)
    try:
        return read_checkpoint(path).get("iteration", -1)
    except ConfigError:
        return -1
