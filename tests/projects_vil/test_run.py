"""Training and evaluation in one call, on a dataset that is named by its folder."""

import json
import shutil

import cv2
import pytest

from projects_vil import Run, load_config, train
from projects_vil.run import evaluate
from tests.projects_vil.helpers import CONFIGS, SMALL, message

KEYS = dict(zip(SMALL["retinanet"][::2], SMALL["retinanet"][1::2], strict=True))
TINY = "vil_tiny_1_1_3_1_rpb"


@pytest.fixture
def data(shapes, tmp_path, monkeypatch):
    """Images with masks, and an empty working directory."""
    shutil.copytree(shapes, tmp_path / "mine")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "mine"


def test_train_evaluate_and_predict(data, monkeypatch):
    run = train(data, config=CONFIGS["retinanet"], epochs=2, batch=4, **KEYS)
    assert run == Run(run.folder) and run.folder.samefile("output/mine_retinanet_vil_shapes")
    cfg, recipe = load_config(run.folder / "config.yaml"), load_config(CONFIGS["retinanet"]).SOLVER
    images = len(json.loads((data / "annotations/instances_train.json").read_text())["images"])
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER) == (4, -(-2 * images // 4))
    assert cfg.SOLVER.BASE_LR == pytest.approx(recipe.BASE_LR * 4 / recipe.IMS_PER_BATCH)
    detector = run.detector()
    assert detector.names == ("circle", "square", "triangle")
    assert len(detector(cv2.imread(str(next((data / "val").iterdir())))))
    ((own, results),) = run.results.items()
    ((other, again),) = evaluate(run.folder, data).items()
    assert own != other and results["bbox"] == again["bbox"] and results["bbox"]["AP50"] >= 0
    assert json.loads((run.folder / "evaluation_mine/evaluation.json").read_text()) == {other: again}
    # An interrupted run goes on as it began, and this one has ended.
    folder = run.folder.absolute()
    (folder.parent / "elsewhere").mkdir()
    monkeypatch.chdir(folder.parent / "elsewhere")
    resumed = train(data, config=CONFIGS["retinanet"], output=folder, resume=True, **KEYS)
    found = load_config(resumed.folder / "config.yaml")
    assert (found.SOLVER, found.DATASETS, found.OUTPUT_DIR) == (cfg.SOLVER, cfg.DATASETS, str(folder))
    assert not list((folder.parent / "elsewhere").iterdir())
    monkeypatch.chdir(folder.parents[1])
    # In another folder, with the names of a dataset that is registered already.
    before = sorted(run.folder.rglob("*"))
    text = message(train, data, config=CONFIGS["retinanet"], epochs=1, batch=4, **KEYS)
    assert str(run.folder) in text and "--resume" in text and sorted(run.folder.rglob("*")) == before


def test_a_model_without_a_config_of_its_own(data):
    run = train(
        data,
        model=TINY,
        detector="faster_rcnn",
        output="here",
        **KEYS,
        **{"SOLVER.MAX_ITER": 1, "SOLVER.IMS_PER_BATCH": 2},
    )
    cfg = load_config(run.folder / "config.yaml")
    assert (cfg.MODEL.TRANSFORMER.NAME, cfg.MODEL.MASK_ON, cfg.MODEL.ROI_HEADS.NUM_CLASSES) == (TINY, False, 3)
    # The batch fits in one part: measured.
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATE) == (1, 2, 1)


@pytest.mark.parametrize(
    ("model", "detector", "drop_path"),
    [
        ("vil_tiny", "retinanet", 0.05),
        ("vil_tiny_rpb", "retinanet", 0.05),
        ("vil_small", "mask_rcnn", 0.1),
        ("vil_small_rpb", "mask_rcnn", 0.2),
        ("lit_s_seg", "retinanet", 0.2),
    ],
)
def test_the_name_of_a_model_is_the_variant_that_is_built(data, monkeypatch, model, detector, drop_path):
    """A variant without a config of its own has the recipe of the variant with other positions or tables."""
    started = []
    monkeypatch.setattr("projects_vil.run.train_from_command_line", started.append)
    train(data, model=model, detector=detector, epochs=1, batch=2, device="cpu")
    (args,) = started
    node = load_config(args.config_file, args.opts).MODEL.TRANSFORMER
    assert (node.NAME, node.DROP_PATH) == (model, drop_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"epoch": 3}, "'epochs'"),
        ({"model": "vil_tinny"}, "'vil_tiny"),
        ({"detector": "retinaned"}, "'retinanet'"),
        ({"config": "retinanet/vil_tiny_rpb1x"}, "'retinanet/vil_tiny_rpb_1x'"),
        ({"config": "retinanet/vil_tiny_rpb_1x", "model": "lit_ti"}, "config"),
        ({"MODEL.RETINANET.NUM_CLASSES": 7}, "MODEL.RETINANET.NUM_CLASSES"),
        ({"weights": "absent.pth"}, "absent.pth"),
        ({"device": "cuda:9"}, "cuda:9"),
        ({"epochs": 3, "SOLVER.EPOCHS": 4}, "SOLVER.EPOCHS"),
    ],
)
def test_mistakes_leave_nothing(data, arguments, named):
    assert named in message(train, data, **arguments)
    assert not list((data.parent / "work").glob("output/*"))


def test_errors_in_the_data_of_another_format(data):
    """The message names the dataset as it was given, not the COCO file of a folder that is gone."""
    folder = data.parent / "voc"
    folder.mkdir()
    for path in sorted((data / "train").iterdir())[:4]:
        shutil.copy(path, folder)
        corners = "<xmin>30</xmin><ymin>5</ymin><xmax>10</xmax><ymax>20</ymax>"
        thing = f"<object><name>shape</name><bndbox>{corners}</bndbox></object>"
        (folder / path.with_suffix(".xml").name).write_text(f"<annotation>{thing}</annotation>")
    text = message(train, folder, epochs=1, batch=2)
    assert f"vil check {folder}" in text and not list((data.parent / "work").rglob("*.*"))


def test_mask_rcnn_needs_masks(data):
    for path in (data / "annotations").iterdir():
        content = json.loads(path.read_text())
        for annotation in content["annotations"]:
            del annotation["segmentation"]
        path.write_text(json.dumps(content))
    assert "faster_rcnn" in message(train, data, detector="mask_rcnn")
    assert not list((data.parent / "work").glob("output/*"))
