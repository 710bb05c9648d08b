"""Files for the tests of predicting."""

import json

import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import load_detector
from projects_vil.export import FORMATS, describe_model, make_exportable, metadata_path


@pytest.fixture(scope="session")
def exported_run(trained_run, made_once):
    """A folder with ``one.ts`` and ``batch.ts``, the trained detector for an image and for several at once."""

    def write(folder) -> None:
        cfg = load_config(trained_run / "config.yaml")
        detector, categories = load_detector(cfg, trained_run / "model_final.pth")
        image = torch.zeros(3, 64, 96, dtype=torch.uint8)
        facts = {"precision": "fp32", "input_dtype": "uint8", "weights": "model_final.pth"}
        for name, example in (("one.ts", image), ("batch.ts", torch.stack([image] * 2))):
            exportable = make_exportable(detector, batched=example.ndim == 4)
            FORMATS["torchscript"].write(exportable, example, folder / name)
            metadata = describe_model(cfg, exportable, categories, "torchscript", **facts)
            metadata_path(folder / name).write_text(json.dumps(metadata))

    return made_once("exported_run", write)
