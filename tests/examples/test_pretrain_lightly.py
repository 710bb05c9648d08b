"""The pretraining example gives LightlyTrain a model of its interface, and the written weights start a training."""

import sys
import types
from pathlib import Path

import torch
from detectron2.modeling import build_model

from projects_vil.checkpoint import Checkpointer
from tests.projects_vil.helpers import run_tool, small_config


def test_the_output_has_the_weights_of_the_backbone(tmp_path, monkeypatch):
    """LightlyTrain is replaced by a module that calls the wrapper as its methods do."""
    trained = {}

    def pretrain(*, out, data, model, method, epochs, batch_size):
        features = model.forward_features(torch.rand(2, 3, 64, 96))
        assert features["features"].shape == (2, model.feature_dim(), 2, 3)
        pooled = model.forward_pool(features)["pooled_features"]
        torch.testing.assert_close(pooled[..., 0, 0], features["features"].mean((2, 3)))
        trained.update(model.get_model().state_dict())
        folder = Path(out, "exported_models")
        folder.mkdir(parents=True)
        torch.save(trained, folder / "exported_last.pt")

    monkeypatch.setitem(sys.modules, "lightly_train", types.SimpleNamespace(pretrain=pretrain))
    output = tmp_path / "pretrained.pth"
    assert run_tool("../examples/pretrain_lightly.py", tmp_path, "vil_tiny", output, "--epochs", 1)[0] == 0
    model = build_model(small_config("retinanet", "MODEL.TRANSFORMER.VARIANT", "vil_tiny"))
    Checkpointer(model).load(str(output))
    loaded = model.backbone.bottom_up.net.state_dict()
    assert loaded.keys() == trained.keys() and all(torch.equal(loaded[name], trained[name]) for name in loaded)
