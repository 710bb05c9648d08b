"""Save detectors with a model card, and share them on the Hugging Face Hub."""

import dataclasses
import os
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from detectron2.config import CfgNode
from huggingface_hub import HfApi, ModelCard, ModelCardData, snapshot_download

from backbones import ConfigError
from backbones.checkpoint_files import write_checkpoint
from projects_vil.checkpoint import METADATA_KEY, PUBLISHED_WEIGHTS, Checkpointer, weights_of
from projects_vil.config import CONFIG_FILE, default_config, load_config, with_overrides
from projects_vil.data import Categories
from projects_vil.evaluation import EVALUATION_FILE
from projects_vil.files import read_json
from projects_vil.inference.runners import EagerRunner, ExportedRunner

T = TypeVar("T", bound="HubMixin")
CARD_FILE = "README.md"
# Keys with paths, services and names that belong to one machine.
_PRIVATE = ("OUTPUT_DIR", "LOGGING", "DATASETS", "MODEL.WEIGHTS", "MODEL.DEVICE", "TEST.EXPECTED_RESULTS")
_PRIVATE += ("INPUT.ALBUMENTATIONS",)


class HubMixin:
    """Save, load and upload a :class:`Detector`; see docs/hub.md."""

    runner: EagerRunner | ExportedRunner
    categories: Categories

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, license: str | None = None, repo_id: str | None = None
    ) -> None:
        """Write the weights, the config and a model card into a folder.

        The card has the results in ``evaluation.json`` of the run. An existing card is kept. The score threshold is
        saved in the config. The device, test-time augmentation and the drawing options are not saved.

        Args:
            save_directory: The folder. It is created.
            license: License id of the weights on the Hub, such as ``"apache-2.0"``.
            repo_id: Name on the Hub, for the example in the model card.

        Raises:
            ConfigError: If the detector is an exported file, or the folder is the output directory of a run.
        """
        folder, runner = Path(save_directory), self.runner
        if not isinstance(runner, EagerRunner):
            raise ConfigError("An exported file has no weights to save. Load the run that was exported.")
        if (folder / CONFIG_FILE).exists() and not (folder / PUBLISHED_WEIGHTS).exists():
            raise ConfigError(f"'{folder}' contains another {CONFIG_FILE}. Choose a different folder.")
        config = published_config(runner.cfg)
        metadata = Checkpointer(runner.detector, cfg=config).metadata
        metadata = dataclasses.replace(metadata, classes=self.categories.names, category_ids=self.categories.ids)
        contents = {"model": runner.detector.state_dict(), METADATA_KEY: metadata.to_dict()}
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder / PUBLISHED_WEIGHTS, contents)
        (folder / CONFIG_FILE).write_text(config.dump(), encoding="utf-8")
        if not (folder / CARD_FILE).exists():
            self._model_card(config, license, repo_id).save(folder / CARD_FILE)

    def _model_card(self, config: CfgNode, license: str | None, repo_id: str | None) -> ModelCard:
        runner, run = self.runner, self.runner.weights.parent
        file = run / EVALUATION_FILE
        # The file of a finished run has the results of its best or last checkpoint, with its settings.
        is_finished = file.is_file() and (run / "model_final.pth").is_file() and weights_of(run) == runner.weights
        has_results = is_finished and published_config(load_config(run / CONFIG_FILE)) == config
        has_masks = runner.cfg.MODEL.META_ARCHITECTURE != "RetinaNet" and runner.cfg.MODEL.MASK_ON
        data = ModelCardData(
            library_name="vil-detectron2",
            license=license,
            pipeline_tag="image-segmentation" if has_masks else "object-detection",
            tags=["detectron2", runner.backbone],
        )
        return ModelCard.from_template(
            data,
            template_path=str(Path(__file__).with_name("model_card.md")),
            runner=runner,
            num_parameters=sum(parameter.numel() for parameter in runner.detector.parameters()),
            source=repo_id or "path/to/this/folder",
            has_masks=has_masks,
            categories=self.categories,
            evaluation={k: v for k, v in (read_json(file) if has_results else {}).items() if os.sep not in k},
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        **upload: Any,
    ) -> str:
        """Save the detector into a temporary folder, create the repository if needed, and upload the files.

        Args:
            repo_id: ``OWNER/NAME``.
            license: A license id of the Hub.
            private, token: See ``huggingface_hub.HfApi.create_repo``.
            upload: Arguments of ``huggingface_hub.HfApi.upload_folder``, such as ``revision`` and ``create_pr``.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: See :meth:`save_pretrained`. Other errors are exceptions of ``huggingface_hub``.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, license=license, repo_id=repo_id)
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **upload)

    @classmethod
    def from_pretrained(
        cls: type[T],
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        device: int | str | torch.device | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
        **download: Any,
    ) -> T:
        """Load a detector from a folder written by :meth:`save_pretrained`, or from the Hub.

        Args:
            pretrained_model_name_or_path: A folder, or ``OWNER/NAME`` on the Hub. A ``Path`` is always a folder.
            device, score_threshold, tta: See :meth:`Detector.load`.
            download: Arguments of ``huggingface_hub.snapshot_download``, such as ``revision``, ``cache_dir``, ``token``
                and ``local_files_only``.

        Raises:
            ConfigError: If the folder or repository has no such detector. Other errors are exceptions of
                ``huggingface_hub``.
        """
        folder = Path(pretrained_model_name_or_path)
        if isinstance(pretrained_model_name_or_path, str) and not folder.exists():
            files = [CONFIG_FILE, PUBLISHED_WEIGHTS, CARD_FILE]
            folder = Path(snapshot_download(pretrained_model_name_or_path, allow_patterns=files, **download))
        return cls.load(folder, device=device, score_threshold=score_threshold, tta=tta)


def published_config(cfg: CfgNode) -> CfgNode:
    """Return a config without the weights, folders, device, services and datasets of one machine."""
    usual = default_config()
    return with_overrides(cfg, {key: attrgetter(key)(usual) for key in _PRIVATE})
