"""Saving a detector for others, and loading one from a folder or the hub."""

import contextlib
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import HfApi, ModelCard, ModelHubMixin, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from backbones import InputError
from projects_vil.checkpoint import Categories, fingerprint
from projects_vil.config import CONFIG_FILE, one_line
from projects_vil.export import FORMATS
from projects_vil.inference.runners import Predictor, Runner
from projects_vil.inference.sharing.folder import (
    CARD_FILE,
    PATTERNS,
    PROOFS,
    WEIGHTS_FILE,
    earlier_license,
    write_folder,
)
from projects_vil.inference.sharing.licenses import OTHER, check_license
from projects_vil.inference.sharing.model_card import LIBRARY, model_card
from projects_vil.inference.sharing.proofs import Proofs, find_proofs
from projects_vil.inference.sharing.published import published_config

T = TypeVar("T", bound="Shared")
# What can be no name on the hub, which is NAME or OWNER/NAME: nobody is asked for it over the network.
_PATH = re.compile(r"[./~\\].*|[A-Za-z]:.*|.*\\.*|.*/|.*/.*/.*", re.DOTALL)
# The ends of checkpoints, configs and exports, which are nobody's name there.
_FILES = {".pth", ".pkl", ".safetensors", ".yaml", *(known.suffix for known in FORMATS.values())}
# What the system raises below a client: no such host, no answer.
_UNREACHED = (socket.gaierror, ConnectionError, TimeoutError)


class Shared(ModelHubMixin, library_name=LIBRARY):
    """What a detector has of ``huggingface_hub``'s mixin: it is saved, loaded and uploaded as safetensors and text.

    Attributes:
        runner: what detects.
        categories: its classes.
    """

    runner: Runner
    categories: Categories

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, license: str | None = None, repo_id: str | None = None
    ) -> None:
        """Write weights, config, a card and what proves the figures on it into a folder (docs/sharing.md).

        The evaluation and the reports on exports that lie beside the weights come along where they are of these very
        weights with these very settings; the log names those that are not. The config and the lowest score that it has
        are kept; device, test-time augmentation and what drawings show are those of who loads the folder.

        Args:
            save_directory: a folder, which is made. What an earlier save wrote there is replaced, and other files stay.
            license: of the weights, as the hub names it, ``"apache-2.0"``; None for that of an earlier save there, or
                where none is stated.
            repo_id: the name on the hub that the card is to give.

        Raises:
            InputError: for an exported file, which has no weights, a config that cannot be shared, a licence that the
                hub does not know, a repo_id that is no name on the hub, or a folder with files of these names that no
                earlier save wrote, or that were changed since.
        """
        logger, folder = logging.getLogger(__name__), Path(save_directory)
        if license is None and (license := earlier_license(folder)) is not None:
            logger.warning("the licence of the earlier save in %s is kept: %s", folder, license)
        card, proofs, model = self._describe(license, repo_id)
        if license == OTHER and not (folder / "LICENSE").exists():
            logger.warning("the card says license: %s: its text belongs beside it, in a file LICENSE", OTHER)
        for line in proofs.left_out:
            logger.warning("left out: %s", line)
        runner = self._predictor
        cfg = published_config(runner.cfg)
        write_folder(folder, cfg, runner.detector, self.categories, proofs, card, model=model)

    def generate_model_card(self, *, license: str | None = None, repo_id: str | None = None) -> ModelCard:
        """The card alone; arguments and errors as of :meth:`save_pretrained`."""
        return self._describe(license, repo_id)[0]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,
        commit_message: str = "Upload a detector of vil-detectron2",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
        allow_patterns: list[str] | str | None = None,
        ignore_patterns: list[str] | str | None = None,
        delete_patterns: list[str] | str | None = None,
    ) -> str:
        """Save the detector into a temporary folder, have the hub check its card, and upload the folder.

        Nothing is made on the hub before that. Where weights are uploaded, what proves figures of the earlier ones, an
        evaluation or a report on an export, is removed there unless it is uploaded anew.

        Args:
            repo_id: ``OWNER/NAME``; the repository is made where there is none.
            license: as the hub names it; where it is None none is stated, whatever a card on the hub has.
            commit_message, private, token, branch, create_pr, allow_patterns, ignore_patterns, delete_patterns: as
                the mixin's. ``ignore_patterns="README.md"`` leaves a card on the hub as it is, and
                ``delete_patterns=[]`` what is removed by default.

        Returns:
            The address of the commit.

        Raises:
            InputError: as of :meth:`save_pretrained`, and where the hub cannot be reached or refuses.
        """
        if delete_patterns is None and _is_uploaded(WEIGHTS_FILE, allow_patterns, ignore_patterns):
            delete_patterns = list(PROOFS)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "detector"
            self.save_pretrained(folder, license=license, repo_id=repo_id)
            with _explaining(f"{repo_id} cannot be uploaded"):
                ModelCard.load(folder / CARD_FILE).validate()
                api = HfApi(token=token)
                made = api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
                return api.upload_folder(
                    repo_id=made.repo_id,
                    repo_type="model",
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                    allow_patterns=allow_patterns,
                    ignore_patterns=ignore_patterns,
                    delete_patterns=delete_patterns,
                )

    @classmethod
    def from_pretrained(
        cls: type[T],
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        device: str | torch.device | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
    ) -> T:
        """The detector of a folder that :meth:`save_pretrained` wrote, or of a repository on the hub.

        Args:
            pretrained_model_name_or_path: a folder, or else ``OWNER/NAME`` on the hub. What has the form of a path is
                never asked for over the network.
            revision, cache_dir, token, local_files_only, force_download: as ``huggingface_hub.snapshot_download`` has
                them. A folder has no revision, and the others have no effect on it.
            device, score_threshold, tta: as of :meth:`Detector.load`.

        Raises:
            InputError: for a folder or a repository that is not there or holds no such detector, or one that was not
                saved to its end, or a hub that cannot be reached.
        """
        name = os.fspath(pretrained_model_name_or_path)
        folder = Path(name)
        if not folder.is_dir():
            if folder.exists():
                raise InputError(f"{name} is a file: name its folder, or load it with Detector.load")
            if isinstance(pretrained_model_name_or_path, os.PathLike) or _PATH.fullmatch(name):
                raise InputError(f"there is no folder {name}")
            _check_repo_id(name, wanted="neither a folder nor a name on the hub")
            with _explaining(f"there is no folder {name}, and it cannot be had from the hub"):
                folder = Path(
                    snapshot_download(
                        name,
                        revision=revision,
                        cache_dir=cache_dir,
                        token=token,
                        local_files_only=local_files_only,
                        force_download=force_download,
                        allow_patterns=list(PATTERNS),
                    )
                )
        elif revision is not None:
            raise InputError(f"{name} is a folder here, and has no revision {revision}: leave it out")
        for needed in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / needed).is_file():
                raise InputError(f"{name} has no {needed}: it holds no detector that save_pretrained wrote")
        weights = folder / WEIGHTS_FILE
        return cls.load(folder, weights=weights, device=device, score_threshold=score_threshold, tta=tta)

    @property
    def _predictor(self) -> Predictor:
        if not isinstance(self.runner, Predictor):
            raise InputError("an exported file has no weights to share: load the run that it was exported from")
        return self.runner

    def _describe(self, license_id: str | None, repo_id: str | None) -> tuple[ModelCard, Proofs, str]:
        check_license(license_id)
        if repo_id is not None:
            _check_repo_id(repo_id, wanted="no name on the hub")
        runner = self._predictor
        model = fingerprint(runner.cfg, runner.detector)
        proofs = find_proofs(runner.weights.parent, model)
        place = repo_id or "path/to/this/folder"
        card = model_card(runner.cfg, runner.detector, self.categories, proofs, license_id=license_id, place=place)
        return card, proofs, model


def hint_at_hub(name: str) -> str:
    """What to say of a file that is not there: what ``OWNER/NAME`` is loaded by; empty for another form."""
    if name.count("/") != 1 or _PATH.fullmatch(name) or Path(name).suffix in _FILES:
        return ""
    return "; if that is a name on the hub, Detector.from_pretrained takes it"


def _check_repo_id(name: str, *, wanted: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is {wanted}: {one_line(error)}") from error


def _is_uploaded(name: str, allow: list[str] | str | None, ignore: list[str] | str | None) -> bool:
    return name in filter_repo_objects([name], allow_patterns=allow, ignore_patterns=ignore)


@contextlib.contextmanager
def _explaining(what: str) -> Iterator[None]:
    """One line for what the hub's client raises."""
    try:
        yield
    except Exception as error:  # Its versions have clients with exceptions of their own, which share no other base.
        raise InputError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "its owner has to grant access; ask there, and log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private: `hf auth login`, or token="
    status = getattr(error.response, "status_code", None) if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"you are not logged in, or may not (status {status}): `hf auth login`, or token="
    if isinstance(error, LocalEntryNotFoundError):
        return "it is not in the cache, and the hub was not asked or cannot be reached"
    if any(isinstance(cause, _UNREACHED) for cause in _causes(error)):
        return f"the hub cannot be reached ({one_line(error)})"
    return one_line(error) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
