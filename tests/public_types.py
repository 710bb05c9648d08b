"""How users call the public API: `make types` checks this file, and nothing runs it."""

import numpy as np
import torch
from detectron2.config import CfgNode
from typing_extensions import assert_type

from backbones import create_backbone, create_classifier, list_variants
from backbones.convert import ConversionReport, convert_state_dict
from projects_vil import (
    Checkpointer,
    Detector,
    Run,
    Trainer,
    add_vil_config,
    build_optimizer,
    load_config,
    register_datasets,
    train,
)
from projects_vil.inference import Detections


def use_backbones(images: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
    assert_type(list_variants("vil"), list[str])
    model = create_backbone("vil_small_rpb", out_features=("stage2",), drop_path_rate=0.1)
    assert_type(model.forward(images), dict[str, torch.Tensor])
    assert_type(model.feature_info["stage2"].channels, int)
    assert_type(model.no_weight_decay(), set[str])
    assert_type(create_classifier("lit_ti", num_classes=10).forward(images), torch.Tensor)
    assert_type(convert_state_dict(weights, "vil_small_rpb"), tuple[dict[str, torch.Tensor], ConversionReport])


def use_detectors(cfg: CfgNode, model: torch.nn.Module) -> None:
    assert_type(train("photos", model="vil_tiny", epochs=4, batch=2, output="out", device="cpu"), Run)
    detector = Detector.load("out", device="cpu", overrides=["INPUT.MIN_SIZE_TEST", 640])
    assert_type(detector, Detector)
    assert_type(detector("a.jpg"), Detections)
    assert_type(detector(["a.jpg", np.zeros((64, 96, 3), np.uint8)], batch_size=2), list[Detections])
    assert_type(detector("a.jpg").names, list[str])
    assert_type(load_config("config.yaml", ["SEED", "1"]), CfgNode)
    assert_type(build_optimizer(cfg, model), torch.optim.Optimizer)
    add_vil_config(cfg)
    register_datasets(cfg)
    Checkpointer(model, "out", cfg=cfg).load("out/model_final.pth")
    Trainer(cfg).resume_or_load(resume=True)
