"""Checkpoints of a run: find the checkpoint to resume from, remove old ones, and copy without training state."""

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
    """Return the checkpoints of a run, newest first, without the best checkpoint."""
    files = [path for path in Path(folder).glob("model_*.pth") if path.is_file() and path.name != BEST_CHECKPOINT]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def last_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, the last one first, without the best checkpoint.

    The last one is the file that ``last_checkpoint`` names. If it names none, the checkpoint with the most iterations
    comes first, because copying a folder changes modification times.
    """
    files, tag = checkpoints_of(folder), Path(folder) / LAST_CHECKPOINT
    name = tag.read_text(errors="replace").strip() if tag.is_file() else ""
    if name and Path(name).name == name and os.path.isfile(tag.parent / name):
        files.sort(key=lambda path: path.name != name)
        return files if files[:1] == [tag.parent / name] else [tag.parent / name, *files]
    if len(files) > 1:
        _logger.warning(
            "%s does not name a checkpoint in its folder (%r). The newest complete one is used.", tag, name[:80]
        )
        files.sort(key=_iteration, reverse=True)
    return files


def weights_of(run: str | Path) -> Path | None:
    """Return the last checkpoint of a run, or else its best one, or the weights of a published folder, or None."""
    for path in (*last_checkpoints(run), Path(run) / BEST_CHECKPOINT, Path(run) / PUBLISHED_WEIGHTS):
        if path.is_file():
            return path
    return None


def read_last_checkpoint(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the checkpoint to resume from: the last complete one. The log lists skipped checkpoints.

    Args:
        folder: output directory of a run.

    Returns:
        The path of the checkpoint and its contents; None if the folder has no checkpoint.

    Raises:
        ConfigError: if no checkpoint in the folder is complete, or if the only one is missing.
    """
    candidates, tag = last_checkpoints(folder), Path(folder) / LAST_CHECKPOINT
    for path in candidates:
        try:
            contents = read_checkpoint(path)
        except ConfigError as error:
            _logger.warning("skipped a checkpoint: %s", error)
            continue
        trainer = contents.get("trainer")
        if isinstance(trainer, dict) and type(trainer.get("iteration")) is int:
            return path, contents
        _logger.warning("skipped a checkpoint: '%s' has no training state to resume from.", path)
    if candidates:
        raise ConfigError(
            f"Cannot resume from any of the {len(candidates)} checkpoints in '{folder}'. Remove them to start again, "
            "or choose another OUTPUT_DIR."
        )
    if tag.is_file():
        raise ConfigError(f"The checkpoint in '{tag}' does not exist. Restore it, or remove '{tag}' to start again.")
    return None


def tag_checkpoint(folder: str | Path, name: str) -> None:
    """Write the name of a checkpoint into ``last_checkpoint``."""
    with atomic_write(Path(folder) / LAST_CHECKPOINT) as partial:
        partial.write_text(name)


def remove_old(folder: str | Path, *, keep: int) -> None:
    """Remove old numbered checkpoints (``model_0000999.pth``), except for the ``keep`` newest ones, at least one."""
    numbered = [path for path in checkpoints_of(folder) if path.stem.removeprefix("model_").isdecimal()]
    for path in numbered[max(keep, 1) :]:
        path.unlink(missing_ok=True)


def remove_run(folder: str | Path) -> None:
    """Remove all checkpoints of an earlier run, so that the next run cannot resume from them."""
    for path in (Path(folder) / LAST_CHECKPOINT, *checkpoints_of(folder), Path(folder) / BEST_CHECKPOINT):
        path.unlink(missing_ok=True)


def remove_partial(folder: str | Path) -> None:
    """Remove incomplete files of processes that were killed while writing."""
    for path in Path(folder).glob(".*.partial"):
        path.unlink(missing_ok=True)


def slim_checkpoint(source: str | Path, output: str | Path) -> list[str]:
    """Copy the weights and metadata of a detector, without the state of optimizer, scheduler and trainer.

    Use the copy for ``MODEL.WEIGHTS``, evaluation and export. Training cannot resume from it.

    Args:
        source: a ``.pth`` or ``.safetensors`` checkpoint of this project or of detectron2.
        output: a ``.pth`` or ``.safetensors`` file. An existing file is replaced, unless it is the source.

    Returns:
        The sizes of both files and the keys that were left out, as lines of text.

    Raises:
        ConfigError: if the source cannot be read or is not a detector, if both files are the same, or if the output
            cannot be written.
    """
    source, output = Path(source), Path(output)
    check_writable(output)
    if source.exists() and output.exists() and source.samefile(output):
        raise ConfigError(f"The output '{output}' is the source. Choose another file.")
    contents = read_checkpoint(source)
    model = contents.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ConfigError(f"'{source}' has no state dict of tensors under 'model'. Use a checkpoint of detectron2.")
    kept = {key: value for key, value in contents.items() if key in ("model", METADATA_KEY)}
    write_checkpoint(output, kept)
    before, after = (path.stat().st_size / 1e6 for path in (source, output))
    removed = ", ".join(sorted(str(key) for key in contents.keys() - kept.keys())) or "nothing"
    lines = [f"{before:.1f} MB before, {after:.1f} MB now; left out: {removed}"]
    if METADATA_KEY not in contents:
        lines.append("the file has no metadata (variant, classes, input format)")
    return lines


def _iteration(path: Path) -> int:
    """Return the iteration in the name of a file, or else in its contents; -1 if it cannot be read."""
    number = path.stem.removeprefix("model_")
    if number.isdecimal():
        return int(number)
    try:
        iteration = read_checkpoint(path).get("iteration")
    except ConfigError:
        return -1
    return iteration if type(iteration) is int else -1
