"""Exported files. Each is written once for all tests and processes: copy a file before you change it."""

import functools
import json
from pathlib import Path

import pytest
import torch

from projects_vil.export import ExportedModel, export_detector
from tests.projects_vil.export.exporting import demo_detector, skip_without
from tests.projects_vil.helpers import small_config


@pytest.fixture(scope="session")
def weights(made_once):
    """Return the path of a checkpoint of a demo detector."""

    def save(name: str = "retinanet") -> Path:
        def fill(folder: Path) -> None:
            torch.save({"model": demo_detector(name).state_dict()}, folder / f"{name}.pth")

        return made_once(f"weights_{name}", fill) / f"{name}.pth"

    return save


@pytest.fixture(scope="session")
def exported(made_once, weights):
    """Return the path and report of an exported demo detector; by default in TorchScript."""

    @functools.cache
    def export(name: str, **options) -> tuple[Path, dict]:
        def fill(folder: Path) -> None:
            path, report = export_detector(small_config(name), weights(name), folder / "export", **options)
            (folder / "returned.json").write_text(json.dumps([str(path), report]))

        folder = made_once("_".join(["exported", name, *map(str, options.values())]), fill)
        path, report = json.loads((folder / "returned.json").read_text())
        return Path(path), report

    return export


@pytest.fixture(scope="session")
def written(file_of):
    """Return the :class:`ExportedModel` of a detector, a format and options of :func:`.exporting.write`."""

    @functools.cache
    def load(name: str, file_format: str, **options) -> ExportedModel:
        skip_without(file_format)
        return ExportedModel(file_of(name, file_format, **options))

    return load
