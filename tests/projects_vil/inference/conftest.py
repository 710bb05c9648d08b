"""Files for the tests of predicting."""

import json
import shutil

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import load_detector
from projects_vil.export import describe_model, make_exportable, metadata_path, write_model
from tests.projects_vil.inference.helpers import picture, save


@pytest.fixture
def files(tmp_path):
    """An image in a folder, and a file in the role of weights."""
    save(tmp_path / "in/a.png", picture(40, 60))
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pth").write_text("")
    return tmp_path


@pytest.fixture(scope="session")
def exported_run(trained_run, tmp_path_factory):
    """A folder with ``one.ts`` and ``batch.ts``, the trained detector for an image and for several at once."""
    folder = tmp_path_factory.mktemp("exported")
    cfg = load_config(trained_run / "config.yaml")
    detector, categories = load_detector(cfg, trained_run / "model_final.pth")
    image = torch.zeros(3, 64, 96, dtype=torch.uint8)
    facts = {"classes": categories.names, "category_ids": categories.ids, "weights": "model_final.pth"}
    facts |= {"file_format": "torchscript", "precision": "fp32", "input_dtype": "uint8"}
    for name, example in (("one.ts", image), ("batch.ts", torch.stack([image] * 2))):
        exportable = make_exportable(detector, batched=example.ndim == 4)
        write_model(exportable, example, folder / name, "torchscript")
        metadata_path(folder / name).write_text(json.dumps(describe_model(cfg, exportable, **facts)))
    yield folder
    shutil.rmtree(folder)
