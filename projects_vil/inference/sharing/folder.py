"""The folder of a shared detector: written whole or not at all, and never over files that are not its own."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from detectron2.config import CfgNode
from huggingface_hub import ModelCard
from torch import nn

from backbones import InputError
from backbones.utils.files import read_checkpoint, write_checkpoint
from projects_vil.checkpoint import PROVENANCE_KEY, Categories, Checkpointer, versions
from projects_vil.config import CONFIG_FILE, load_config
from projects_vil.evaluation import EVALUATED_FILE, RESULTS_FILE, results_as_files
from projects_vil.export import digest_of
from projects_vil.inference.sharing.proofs import REPORTS, Proofs
from projects_vil.utils import held_signals, unfinished_folder

WEIGHTS_FILE, CARD_FILE, MANIFEST_FILE = "model.safetensors", "README.md", "detector.json"
# What is of these very weights, and not in every save.
PROOFS = (RESULTS_FILE, EVALUATED_FILE, REPORTS)
# All that a repository on the hub can have of a detector.
PATTERNS = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, MANIFEST_FILE, *PROOFS)
# In the manifest while files are replaced, and after that only where a save was killed: name -> digests of before.
_REPLACED = "replaced"


def write_folder(
    folder: Path,
    cfg: CfgNode,
    detector: nn.Module,
    categories: Categories,
    proofs: Proofs,
    card: ModelCard,
    *,
    model: str,
) -> None:
    """Write a detector into a folder, which is made; an earlier save there is replaced.

    Args:
        folder: other files in it stay.
        cfg: as it is to be published.
        detector: has the weights.
        categories: its classes.
        proofs: files beside it.
        card: its ``README.md``.
        model: the detector's fingerprint, by which its evaluation is known again.

    Raises:
        InputError: where the folder has a file of one of these names that no earlier save wrote, or that was changed
            since, or where it cannot be written to; nothing is changed then.
    """
    texts = {CONFIG_FILE: cfg.dump(), CARD_FILE: f"{card}\n"}
    if proofs.evaluation is not None:
        texts |= results_as_files(proofs.evaluation, model=model)
    texts |= {name: json.dumps(report, indent=2) + "\n" for name, report in proofs.reports.items()}
    with _replacing(folder, [*texts, WEIGHTS_FILE]) as unfinished:
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        said = dataclasses.replace(
            Checkpointer(detector, cfg=cfg).provenance, classes=categories.names, category_ids=categories.ids
        )
        write_checkpoint(unfinished / WEIGHTS_FILE, {"model": detector.state_dict(), PROVENANCE_KEY: said.to_dict()})
        check_files(unfinished)


def earlier_license(folder: Path) -> str | None:
    """The licence on the card that an earlier save wrote into a folder; None where there is no such card or licence.

    Raises:
        InputError: for a card that was changed since.
    """
    path, earlier = folder / CARD_FILE, _earlier_files(folder)
    if not path.is_file() or CARD_FILE not in earlier:
        return None
    _check_own(folder, {CARD_FILE}, earlier)
    return _read_card(path).data.license


def check_files(folder: Path) -> None:
    """Raise an :class:`InputError` where one of the files is missing or cannot be read."""
    load_config(folder / CONFIG_FILE)
    read_checkpoint(folder / WEIGHTS_FILE)
    _read_card(folder / CARD_FILE)


def _read_card(path: Path) -> ModelCard:
    try:
        return ModelCard.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no model card: {' '.join(str(error).split())}") from error


def check_saved(folder: Path) -> None:
    """Raise an :class:`InputError` where a save was killed while it replaced files, which are then of two detectors."""
    try:
        is_begun = _REPLACED in json.loads((folder / MANIFEST_FILE).read_text())
    except (OSError, ValueError, TypeError):
        return  # No save has written here, or none is known of.
    if is_begun:
        raise InputError(f"{folder} was not saved to its end, and may have files of two detectors: save into it again")


@contextlib.contextmanager
def _replacing(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """A folder to write files to, which then take the place of those that an earlier save wrote."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder to save into")
    earlier = _earlier_files(folder)
    _check_own(folder, {*names, *earlier}, earlier)
    with unfinished_folder(folder) as unfinished:
        try:
            yield unfinished
            _put_in_place(folder, unfinished, earlier)
        except OSError as error:
            raise InputError(f"cannot write into {folder}: {error.strerror or error}") from error


def _put_in_place(folder: Path, unfinished: Path, earlier: Mapping[str, list[str]]) -> None:
    """Move the files, so that what is there is known as ours, old or new, wherever this ends."""
    files = {path.name: digest_of(path) for path in sorted(unfinished.iterdir())}
    manifest = {"format": 1, "versions": versions(), "files": files}
    begun = unfinished / f"{MANIFEST_FILE}.begun"
    begun.write_text(json.dumps(manifest | {_REPLACED: earlier}, indent=2) + "\n")
    (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")
    with held_signals():
        os.replace(begun, folder / MANIFEST_FILE)
        for name in files:
            os.replace(unfinished / name, folder / name)
        for name in earlier.keys() - files.keys():
            (folder / name).unlink(missing_ok=True)
        os.replace(unfinished / MANIFEST_FILE, folder / MANIFEST_FILE)


def _earlier_files(folder: Path) -> dict[str, list[str]]:
    """Name -> digests of the files that an earlier save wrote here; two or more where a save was killed."""
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        return {}
    try:
        manifest = json.loads(path.read_text())
        digests = {name: list(before) for name, before in manifest.get(_REPLACED, {}).items()}
        for name, digest in manifest["files"].items():
            digests[name] = [*digests.get(name, []), digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        digests = None
    # A name from elsewhere must not reach out of the folder.
    if digests is None or any(name != Path(name).name or name in ("", "..") for name in digests):
        raise InputError(f"{path} is not of an earlier save: choose another folder")
    return digests


def _check_own(folder: Path, names: Iterable[str], earlier: Mapping[str, list[str]]) -> None:
    for name in sorted(names):
        path = folder / name
        if not os.path.lexists(path):
            continue
        if name not in earlier:
            raise InputError(f"{path} is there, and no earlier save wrote it: choose another folder, or move it away")
        if not path.is_file() or digest_of(path) not in earlier[name]:
            raise InputError(f"{path} was changed since it was saved: choose another folder, or move it away")
