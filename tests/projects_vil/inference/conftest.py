"""Files for the tests of predicting."""

import json

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import load_detector
from projects_vil.export import describe_model, make_exportable, metadata_path, write_model


@pytest.fixture(scope="session")
def exported_run(trained_run, made_once):
    """A folder with ``one.ts`` and ``batch.ts``, the trained detector for an image and for several at once."""

    def write(folder) -> None:
        cfg = load_config(trained_run / "config.yaml")
        detector, categories = load_detector(cfg, trained_run / "model_final.pth")
        image = torch.zeros(3, 64, 96, dtype=torch.uint8)
        facts = {"classes": categories.names, "category_ids": categories.ids, "weights": "model_final.pth"}
        facts |= {"file_format": "torchscript", "precision": "fp32", "input_dtype": "uint8"}
        for name, example in (("one.ts", image), ("batch.ts", torch.stack([image] * 2))):
            exportable = make_exportable(detector, batched=example.ndim == 4)
            write_model(exportable, example, folder / name, "torchscript")
            metadata_path(folder / name).write_text(json.dumps(describe_model(cfg, exportable, **facts)))

    return made_once("exported_run", write)
