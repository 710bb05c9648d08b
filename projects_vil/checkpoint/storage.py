"""The checkpoints of a run's folder: which is the newest that is whole, and how many are kept."""

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from backbones import InputError
from backbones.utils.files import read_checkpoint, written_whole

LAST_CHECKPOINT, BEST_CHECKPOINT = "last_checkpoint", "model_best.pth"
_PATTERN = "model_*.pth"


def checkpoints_of(folder: str | Path) -> list[Path]:
    """The checkpoints that training can resume from, those written last first; the best one is for evaluation."""
    files = [path for path in Path(folder).glob(_PATTERN) if path.is_file() and path.name != BEST_CHECKPOINT]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def find_checkpoint(folder: str | Path, *, logger: logging.Logger | None = None) -> Path | None:
    """The checkpoint to resume from: the one that ``last_checkpoint`` names, or else the newest that is whole.

    Args:
        folder: OUTPUT_DIR of a run.
        logger: is told what is passed over, and why.

    Returns:
        None where there is no checkpoint.

    Raises:
        InputError: where there are some, and none is whole, or where ``last_checkpoint`` names one and there is none.
    """
    logger = logger or logging.getLogger(__name__)
    candidates = checkpoints_of(folder)
    tag = Path(folder) / LAST_CHECKPOINT
    text = tag.read_text(errors="replace").strip() if tag.is_file() else ""
    named = next((path for path in Path(folder).glob("*") if path.name == text and path.is_file()), None)
    if named is not None:
        candidates = [named, *(path for path in candidates if path != named)]
    elif candidates:
        # A copy of the folder has other times.
        candidates.sort(key=_iteration, reverse=True)
        what = f"names {_shown(text)}, which is no checkpoint of this folder" if text else "is missing or empty"
        logger.warning("%s %s: the newest whole checkpoint there is taken", tag, what)
    for path in candidates:
        try:
            contents = read_checkpoint(path)
        except InputError as error:
            logger.warning("passed over: %s", error)
            continue
        if "trainer" in contents:
            return path
        logger.warning("passed over: %s has no state of a run to resume", path)
    if candidates:
        raise InputError(
            f"none of the {len(candidates)} checkpoints in {folder} can be resumed; take them away to start anew, or "
            "choose another OUTPUT_DIR"
        )
    if text:
        raise InputError(f"{tag} names {_shown(text)}, and {folder} has no checkpoint: remove {tag} to start anew")
    return None


def optimizer_groups(path: str | Path) -> list[dict[str, Any]] | None:
    """The groups of parameters in a whole checkpoint of a run, as torch saves them; None for one without an optimizer.

    Args:
        path: as :func:`find_checkpoint` returns it.
    """
    # Mapped, since its tensors are not needed.
    value = torch.load(path, mmap=zipfile.is_zipfile(path), weights_only=True)
    for key in ("trainer", "_trainer", "optimizer", "param_groups"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]} ..."


def _iteration(path: Path) -> float:
    """Of the name, or of the contents where that has none; of what cannot be read, before all."""
    number = path.stem.removeprefix("model_")
    if number.isdecimal():
        return int(number)
    try:
        return read_checkpoint(path).get("iteration", -1)
    except InputError:
        return -1


def tag_checkpoint(folder: str | Path, name: str) -> None:
    """Let ``last_checkpoint`` name a file of the folder.

    Raises:
        InputError: where it cannot be written.
    """
    with written_whole(Path(folder) / LAST_CHECKPOINT) as partial:
        partial.write_text(name)


def remove_old(folder: str | Path, *, keep: int) -> None:
    """Remove the oldest numbered checkpoints, ``model_0000999.pth`` and the like, beyond ``keep`` of them."""
    numbered = [path for path in checkpoints_of(folder) if path.stem.removeprefix("model_").isdecimal()]
    for path in numbered[max(keep, 1) :]:
        path.unlink(missing_ok=True)


def remove_run(folder: str | Path) -> None:
    """Remove the checkpoints of an earlier run, so that none of them is taken for one of the next."""
    (Path(folder) / LAST_CHECKPOINT).unlink(missing_ok=True)
    for path in (*checkpoints_of(folder), Path(folder) / BEST_CHECKPOINT):
        path.unlink(missing_ok=True)


def remove_partial(folder: str | Path) -> None:
    """Remove what processes that were killed while they wrote have left."""
    for path in Path(folder).glob(".*.partial"):
        path.unlink(missing_ok=True)
