"""A dataset of one's own."""

import shutil

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from tests.projects_vil.data.own import NAME


@pytest.fixture
def copy(shapes, tmp_path):
    """A dataset of one's own to spoil: annotations.json and images/."""
    shutil.copytree(shapes / "val", tmp_path / "images")
    shutil.copy(shapes / "annotations/instances_val.json", tmp_path / "annotations.json")
    yield tmp_path
    for name in DatasetCatalog.list():
        if name.startswith(NAME):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
