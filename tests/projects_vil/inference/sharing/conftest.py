"""A run to share, and what is shared of it."""

import shutil
from pathlib import Path

import pytest

from projects_vil import Detector
from tests.projects_vil.inference.sharing.helpers import CLASSES, make_run


@pytest.fixture(scope="session")
def run(made_once):
    """OUTPUT_DIR, to be read."""
    return made_once("run_to_share", make_run)


@pytest.fixture
def own_run(run, tmp_path):
    """A copy, to be spoiled."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture(scope="session")
def detector(run):
    return Detector(Detector.load(run, device="cpu").runner, categories=CLASSES)


@pytest.fixture(scope="session")
def saved(detector, made_once):
    """What ``save_pretrained`` wrote, to be read."""
    return made_once("saved_to_share", detector.save_pretrained)
