"""Fixtures of the data tests."""

import shutil

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from tests.projects_vil.data.custom_dataset import NAME


@pytest.fixture
def copy(shapes, tmp_path):
    """Return the folder of a small COCO dataset that tests may corrupt: annotations.json and images/."""
    shutil.copytree(shapes / "val", tmp_path / "images")
    shutil.copy(shapes / "annotations/instances_val.json", tmp_path / "annotations.json")
    yield tmp_path
    for name in DatasetCatalog.list():
        if name.startswith(NAME):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
