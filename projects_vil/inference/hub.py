"""Save detectors with a model card, and share them on the Hugging Face Hub."""

import dataclasses
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from detectron2.config import CfgNode
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, snapshot_download
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from backbones import ConfigError
from backbones.checkpoint_files import write_checkpoint
from projects_vil.checkpoint import METADATA_KEY, PUBLISHED_WEIGHTS, Categories, Checkpointer, fingerprint
from projects_vil.config import CONFIG_FILE, default_config, value_of, with_overrides
from projects_vil.evaluation import EVALUATED_MODEL_FILE, EVALUATION_FILE, read_results, results_as_files
from projects_vil.export import describe_report
from projects_vil.inference.runners import EagerRunner, ExportedRunner
from projects_vil.utils import atomic_folder, read_json

T = TypeVar("T", bound="HubMixin")
CARD_FILE = "README.md"
EXPORT_REPORTS = "*.report.json"
# These files describe one set of weights.
REPORT_FILES = (EVALUATION_FILE, EVALUATED_MODEL_FILE, EXPORT_REPORTS)
_TEMPLATE = Path(__file__).with_name("model_card.md")
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
# The Hub's names of detectron2's tasks.
_TASKS = {"bbox": "object-detection", "segm": "image-segmentation"}
# Keys with paths, services and names that belong to one machine.
_PRIVATE = ("OUTPUT_DIR", "LOGGING", "MODEL.WEIGHTS", "MODEL.DEVICE", "TEST.EXPECTED_RESULTS", "DATASETS.COCO")
_PRIVATE += ("DATASETS.ADE20K", "DATASETS.PROPOSAL_FILES_TRAIN", "DATASETS.PROPOSAL_FILES_TEST")
# An absolute path, a path from the home or a relative folder, or a URL.
_PATH = re.compile(r"(?:^|[\s=:,;'\"])(?:~|/|\\\\|[A-Za-z]:[\\/]|\.{1,2}[\\/]|\w+://)")
_logger = logging.getLogger(__name__)


class HubMixin:
    """Save, load and upload a :class:`Detector` as safetensors and text files; see docs/hub.md."""

    runner: EagerRunner | ExportedRunner
    categories: Categories

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, license: str | None = None, repo_id: str | None = None
    ) -> None:
        """Write the weights, the config, a model card and the reports of the weights into a folder.

        The evaluation and the export reports are copied from the folder of the checkpoint if they are for the same
        weights and settings. The score threshold is saved in the config. The device, test-time augmentation and the
        drawing options are not saved.

        Args:
            save_directory: the folder. It is created. An earlier save is replaced, except for its model card.
            license: license id of the weights on the Hub, such as ``"apache-2.0"``.
            repo_id: name on the Hub, for the example in the model card.

        Raises:
            ConfigError: if the detector is an exported file, the config contains private paths, or the folder is the
                folder of a run or cannot be written.
        """
        folder, runner = Path(save_directory), self.runner
        if not isinstance(runner, EagerRunner):
            raise ConfigError("An exported file has no weights to save. Load the run that was exported.")
        if (folder / CONFIG_FILE).exists() and not (folder / PUBLISHED_WEIGHTS).exists():
            raise ConfigError(f"'{folder}' contains another {CONFIG_FILE}. Choose a different folder.")
        config, model = published_config(runner.cfg), fingerprint(runner.cfg, runner.detector)
        evaluation, reports = find_reports(runner.weights.parent, model)
        texts = {CONFIG_FILE: config.dump()} | {name: json.dumps(report, indent=2) for name, report in reports.items()}
        if evaluation is not None:
            texts |= results_as_files(evaluation, model=model)
        if (folder / CARD_FILE).exists():
            _logger.warning("Keeping the existing %s. Delete it to get a new model card.", folder / CARD_FILE)
        else:
            texts[CARD_FILE] = str(self._model_card(evaluation, reports, license, repo_id))
        metadata = dataclasses.replace(
            Checkpointer(runner.detector, cfg=config).metadata,
            classes=self.categories.names,
            category_ids=self.categories.ids,
        )
        # All files are complete before the first file is replaced.
        with atomic_folder(folder) as unfinished:
            for name, text in texts.items():
                (unfinished / name).write_text(text, encoding="utf-8")
            contents = {"model": runner.detector.state_dict(), METADATA_KEY: metadata.to_dict()}
            write_checkpoint(unfinished / PUBLISHED_WEIGHTS, contents)
            for path in [path for pattern in REPORT_FILES for path in folder.glob(pattern)]:
                path.unlink()
            for name in (*texts, PUBLISHED_WEIGHTS):
                os.replace(unfinished / name, folder / name)

    def _model_card(
        self, evaluation: dict | None, reports: dict[str, dict], license: str | None, repo_id: str | None
    ) -> ModelCard:
        cfg, name, backbone = self.runner.cfg, self.runner.architecture, self.runner.backbone
        results = [
            EvalResult(_TASKS[task], dataset, dataset, metric, round(metrics[metric], 3))
            for dataset, tasks in (evaluation or {}).items()
            for task, metrics in tasks.items()
            for metric in _METRICS
            if task in _TASKS and isinstance(metrics.get(metric), (int, float))
        ]
        masks = cfg.MODEL.META_ARCHITECTURE != "RetinaNet" and cfg.MODEL.MASK_ON
        data = ModelCardData(
            library_name="vil-detectron2",
            license=license,
            pipeline_tag=_TASKS["segm" if masks else "bbox"],
            tags=["detectron2", backbone],
            model_name=f"{name}, {backbone}" if results else None,
            eval_results=results or None,
        )
        return ModelCard.from_template(
            data,
            template_path=str(_TEMPLATE),
            detector=name,
            backbone=backbone,
            parameters=sum(parameter.numel() for parameter in self.runner.detector.parameters()),
            source=repo_id or "path/to/this/folder",
            masks=masks,
            cfg=cfg,
            score_threshold=self.runner.score_threshold,
            classes=list(zip(self.categories.ids, self.categories.names, strict=True)),
            metrics=_METRICS,
            evaluations=evaluation or {},
            reports=[describe_report(report) for report in reports.values()],
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
        """Save the detector into a temporary folder, validate its model card, and upload it to the Hub.

        The repository is created if the card is valid. New weights delete the reports of earlier weights.

        Args:
            repo_id: ``OWNER/NAME``.
            license: a license id of the Hub.
            private, token: see ``huggingface_hub.HfApi.create_repo``.
            upload: arguments of ``huggingface_hub.HfApi.upload_folder``, such as ``revision``, ``commit_message``,
                ``create_pr``, ``allow_patterns``, ``ignore_patterns`` and ``delete_patterns``.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: see :meth:`save_pretrained`. Other errors are exceptions of ``huggingface_hub``.
        """
        validate_repo_id(repo_id)
        patterns = {key: upload.get(key) for key in ("allow_patterns", "ignore_patterns")}
        if [*filter_repo_objects([PUBLISHED_WEIGHTS], **patterns)]:
            upload.setdefault("delete_patterns", list(REPORT_FILES))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "detector"
            self.save_pretrained(folder, license=license, repo_id=repo_id)
            ModelCard.load(folder / CARD_FILE).validate()
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
            upload.setdefault("commit_message", "Upload a detector of vil-detectron2")
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **upload)

    @classmethod
    def from_pretrained(
        cls: type[T],
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        device: str | torch.device | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
        **download: Any,
    ) -> T:
        """Load a detector from a folder written by :meth:`save_pretrained`, or from the Hub.

        Args:
            pretrained_model_name_or_path: a folder, or ``OWNER/NAME`` on the Hub. A ``Path`` is always a folder.
            device, score_threshold, tta: see :meth:`Detector.load`.
            download: arguments of ``huggingface_hub.snapshot_download``, such as ``revision``, ``cache_dir``, ``token``
                and ``local_files_only``.

        Raises:
            ConfigError: if the folder or repository has no such detector. Other errors are exceptions of
                ``huggingface_hub``.
        """
        folder = Path(pretrained_model_name_or_path)
        if isinstance(pretrained_model_name_or_path, str) and not folder.exists():
            files = [CONFIG_FILE, PUBLISHED_WEIGHTS, CARD_FILE, *REPORT_FILES]
            folder = Path(snapshot_download(pretrained_model_name_or_path, allow_patterns=files, **download))
        weights = folder / PUBLISHED_WEIGHTS
        return cls.load(folder, weights=weights, device=device, score_threshold=score_threshold, tta=tta)


def find_reports(folder: Path, model: str) -> tuple[dict | None, dict[str, dict]]:
    """Return the evaluation and the export reports of a model, from the folder of its weights and its subfolders.

    Args:
        folder: folder of the weights.
        model: fingerprint of the model.

    Returns:
        The evaluation (dataset -> task -> metric) or None, and a dict of reports by file name. Damaged
        files, files for other weights or settings, and files with private paths are skipped with a warning.
    """
    evaluation, reports = None, {}
    try:
        evaluation = read_results(folder, model=model)
    except ConfigError as error:
        _logger.warning("Skipping the evaluation: %s", error)
    # The name of a dataset may be a path.
    evaluation = {name: tasks for name, tasks in (evaluation or {}).items() if not _PATH.search(name)} or None
    for path in sorted([*folder.glob(EXPORT_REPORTS), *folder.glob(f"*/{EXPORT_REPORTS}")]):
        try:
            report = read_json(path)
        except ConfigError as error:
            _logger.warning("Skipping an export report: %s", error)
            continue
        if not isinstance(report, dict) or report.get("fingerprint") != model:
            _logger.warning("Skipping %s: it is for other weights or settings. Export the model again.", path)
        elif _PATH.search(json.dumps(report)) or path.name in reports:
            _logger.warning("Skipping %s: it contains a path, or another report has the same name.", path)
        else:
            reports[path.name] = report
    return evaluation, reports


def published_config(cfg: CfgNode) -> CfgNode:
    """Return a config without the weights, folders, device, services and dataset files of one machine.

    The names of datasets are kept, except for names that are paths.

    Raises:
        ConfigError: if another key contains a path.
        KeyError: if ``load_config`` does not accept a key.
    """
    usual, published = default_config(), default_config()
    published.merge_from_other_cfg(cfg)
    values = {key: value_of(usual, key) for key in _PRIVATE}
    for key in ("DATASETS.TRAIN", "DATASETS.TEST"):
        values[key] = tuple(name for name in value_of(cfg, key) if not (_PATH.search(name) or os.sep in name))
    published, unchanged = with_overrides(published, values), usual.dump().splitlines()
    for line in published.dump().splitlines():
        if line not in unchanged and _PATH.search(line):
            raise ConfigError(f"The config contains a path: {line.strip()}. Set the key to its default before saving.")
    return published
