"""The requirements of the package."""

import subprocess
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools")
requirements = pytest.importorskip("packaging.requirements")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def required(monkeypatch):
    """Return a function that returns the requirements of the package by name."""
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)

    def read() -> dict:
        found = map(requirements.Requirement, run_setup("setup.py", stop_after="init").install_requires)
        return {one.name: one for one in found}

    return read


def test_old_versions_that_misread_images(required):
    """Pillow 9.1 lacks names of EXIF tags, and versions before 11.0 rotate a TIFF twice."""
    assert not any(required()["Pillow"].specifier.contains(version) for version in ("9.1", "9.5", "10.4"))


def test_the_opencv_of_the_builder_does_not_matter(required, monkeypatch):
    """A wheel has the same requirements on every machine."""
    found = []
    for installed in ("opencv-python-headless", "opencv-contrib-python", ""):
        monkeypatch.setattr(subprocess, "check_output", lambda *_, installed=installed, **__: installed)
        found.append({name: str(one) for name, one in required().items()})
    assert found[0] == found[1] == found[2]
    assert [name for name in found[0] if name.startswith("opencv")] == ["opencv-python"]
