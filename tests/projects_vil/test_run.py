"""``train`` and ``evaluate`` with a dataset folder."""

import contextlib
import json
import shutil
from pathlib import Path

import cv2
import pytest
from detectron2.data.datasets import register_coco_instances

from backbones.errors import GENERATOR
from projects_vil import Run, evaluate, load_config, train
from projects_vil.config import head_of
from projects_vil.data import Mapper
from projects_vil.utils import run_lock
from tests.projects_vil.helpers import CONFIGS, SMALL, contents_of, message, run_python

KEYS = dict(zip(SMALL["retinanet"][::2], SMALL["retinanet"][1::2], strict=True))
TINY = "vil_tiny_1_1_3_1_rpb"


@pytest.fixture
def data(shapes, tmp_path, monkeypatch):
    """Folder of a dataset with masks. The working directory is an empty folder."""
    shutil.copytree(shapes, tmp_path / "mine")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "mine"


@pytest.fixture
def started(monkeypatch) -> list:
    """Collect the configs of runs, which are not trained."""
    configs = []
    monkeypatch.setattr("projects_vil.run.check_setup", lambda cfg, **_: configs.append(cfg))
    monkeypatch.setattr("projects_vil.run.launch", lambda *_, **__: None)
    return configs


@pytest.mark.parametrize("has_gpu", [True, False])
def test_mixed_precision_is_the_default_on_a_gpu(data, monkeypatch, started, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(has_gpu))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    for options in ({}, {"SOLVER.AMP.ENABLED": False}, {"device": "cpu"}, {"config": CONFIGS["retinanet"]}):
        train(data, output=f"run{len(started)}", **({} if "config" in options else {"model": TINY}), **options)
    assert [cfg.SOLVER.AMP.ENABLED for cfg in started] == [has_gpu, False, False, False]


@pytest.mark.slow
def test_training_on_tiles(data):
    """The run trains on crops, and its detector divides larger images."""
    keys = {key: value for key, value in KEYS.items() if not key.startswith("INPUT.")}
    run = train(data, config=CONFIGS["retinanet"], epochs=1, tiles=64, **keys)
    cfg = load_config(run.folder / "config.yaml")
    assert cfg.TEST.TILE_SIZE == 64 and list(cfg.INPUT.CROP.SIZE) == [64, 64]
    assert list(cfg.INPUT.MIN_SIZE_TRAIN) == [64]
    detector, sizes = run.detector(), []
    detector.runner.detector.backbone.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[-1]))
    image = cv2.resize(cv2.imread(str(next((data / "val").iterdir()))), (200, 150))
    boxes = detector(image).boxes
    assert len(sizes) > 8 and max(sizes) <= 64 and boxes[:, 2].max() > 64
    # Images of an evaluation keep their size, too.
    record = {"file_name": str(next((data / "val").iterdir()))}
    assert Mapper(cfg, is_train=False)(record)["image"].shape[1:] == cv2.imread(record["file_name"]).shape[:2]
    assert "Remove one" in message(train, data, tiles=64, image_size=64)


def test_train_evaluate_and_predict(data, monkeypatch, capsys):
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
    assert "warning" not in capsys.readouterr().out
    evaluate(run.folder, data / "annotations/instances_train.json", output="trained")
    assert f"warning: {images} of the evaluated images are copies of training images" in capsys.readouterr().out
    assert json.loads((run.folder / "evaluation_mine/evaluation.json").read_text()) == {other: again}
    # The file has fewer classes than the detector, in another order.
    content = json.loads((data / "annotations/instances_val.json").read_text())
    content["categories"] = [{"id": 1, "name": "triangle"}, {"id": 2, "name": "circle"}]
    ids, objects = {3: 1, 1: 2}, [one for one in content["annotations"] if one["category_id"] in (1, 3)]
    content["annotations"] = [one | {"category_id": ids[one["category_id"]]} for one in objects]
    shutil.copytree(data / "val", data.parent / "two/mine")
    (data.parent / "two/mine/two.json").write_text(json.dumps(content))
    ((label, two),) = evaluate(run.folder, data.parent / "two/mine").items()
    classes = {name: again["bbox"]["per_class"][name] for name in ("triangle", "circle")}
    assert two["bbox"]["per_class"] == classes and label == "evaluation_two_mine_all"
    # The classes come from the checkpoint. The training data may be on another machine, and a test split without
    # annotations is not evaluated.
    shutil.copytree(run.folder, data.parent / "moved")
    config = data.parent / "moved/config.yaml"
    config.write_text(config.read_text().replace(f"{data}/", "/absent/"))
    content["images"] = content["images"][:1]
    (data.parent / "two/mine/test.json").write_text(json.dumps(content | {"annotations": []}))
    (data.parent / "two/mine/two.json").rename(data.parent / "two/mine/val.json")
    shutil.copy(data.parent / "two/mine/val.json", data.parent / "two/mine/train.json")
    ((name, moved),) = evaluate(data.parent / "moved", data.parent / "two/mine").items()
    assert name == "evaluation_two_mine_val" and moved["bbox"] == two["bbox"]
    content["categories"] = [{"id": 1, "name": "Circle"}, {"id": 2, "name": "star"}, {"id": 3, "name": "square"}]
    (data.parent / "two/mine/val.json").write_text(json.dumps(content))
    text = message(evaluate, run.folder, data.parent / "two/mine", output="unknown")
    assert "has classes" in text and "'Circle', 'star'. Did you mean 'circle'" in text and not Path("unknown").exists()
    # A resumed run keeps its settings. This run is complete, so nothing is trained.
    folder = run.folder.absolute()
    (folder.parent / "elsewhere").mkdir()
    monkeypatch.chdir(folder.parent / "elsewhere")
    resumed = train(data, config=CONFIGS["retinanet"], output=folder, resume=True, **KEYS)
    found = load_config(resumed.folder / "config.yaml")
    assert (found.SOLVER, found.DATASETS, found.OUTPUT_DIR) == (cfg.SOLVER, cfg.DATASETS, str(folder))
    assert not list((folder.parent / "elsewhere").iterdir())
    monkeypatch.chdir(folder.parents[1])
    # The default output directory has a run, and the dataset names are already registered.
    before = sorted(run.folder.rglob("*"))
    text = message(train, data, config=CONFIGS["retinanet"], epochs=1, batch=4, **KEYS)
    assert str(run.folder) in text and "--resume" in text and sorted(run.folder.rglob("*")) == before


@pytest.mark.slow
def test_an_error_of_a_process_is_one_line(data):
    """Only the script registers the dataset, and the processes of the run do not import the script."""
    register_coco_instances("registered here", {}, str(data / "annotations/instances_train.json"), str(data / "train"))
    names = {"DATASETS.TRAIN": "('registered here',)"}
    text = message(train, config=CONFIGS["retinanet"], output="run", num_gpus=2, device="cpu", **KEYS, **names)
    assert "registered here" in text and "torchrun" in text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_plain_script_runs_once(data, processes):
    """A script without ``if __name__ == "__main__"``. The processes of the run do not import the script."""
    keys = KEYS | {"SOLVER.MAX_ITER": "1"}
    script = f"print('begin')\nfrom projects_vil import train\ntrain({str(data)!r}, model={TINY!r}, output='run', "
    Path("script.py").write_text(f"{script}num_gpus={processes}, **{keys!r})\nprint('end')\n")
    result = run_python("script.py", root=Path.cwd())
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines.count("begin") == lines.count("end") == 1 and Path("run/model_final.pth").is_file()


@pytest.mark.parametrize(
    ("model", "detector", "weight_decay"),
    [
        ("vil_tiny", "retinanet", 0.1),
        ("vil_small_rpb", "mask_rcnn", 0.05),
        ("ls_small", "mask_rcnn", 0.05),
        ("lit_s_seg", "retinanet", 1e-4),
        (TINY, "faster_rcnn", 0.05),
    ],
)
def test_the_name_of_a_model_is_the_variant_that_is_built(data, started, model, detector, weight_decay):
    """A variant without a config uses the recipe of its family."""
    train(data, model=model, detector=detector, recipe="paper", epochs=1, batch=2, device="cpu")
    assert (started[0].MODEL.TRANSFORMER.VARIANT, started[0].SOLVER.WEIGHT_DECAY) == (model, weight_decay)
    assert (started[0].MODEL.MASK_ON, started[0].MODEL[head_of(started[0])].NUM_CLASSES) == (detector == "mask_rcnn", 3)
    # With a given batch size, gradient accumulation is not chosen automatically.
    assert (started[0].SOLVER.IMS_PER_BATCH, started[0].SOLVER.GRADIENT_ACCUMULATION_STEPS) == (2, 1)
    train(data, model=model, detector=detector, schedule="3x_ms", recipe="paper", image_size=1000, device="cpu")
    # Position tables cover the larger images.
    assert (started[1].INPUT.MIN_SIZE_TRAIN, started[1].MODEL.TRANSFORMER.MAX_IMG_SIZE) == ((1000,), 1667)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"epoch": 3}, "'epochs'"),
        ({"image_size": "large"}, "image_size is 'large'"),
        ({"image_size": 0}, "image_size is 0. Give a whole number from 64 to 4096"),
        ({"tiles": 20}, "tiles is 20"),
        ({"val_fraction": float("nan")}, "val_fraction is nan"),
        ({"overrides": {"SEED": 1}, "SEED": 2}, "SEED is given twice, as 2 and as 1"),
        ({"images": "nope"}, "'nope' (--images) is not a folder"),
        ({"patience": 3}, "'SOLVER.EARLY_STOPPING_PATIENCE'"),
        ({"model": "vil_tinny"}, "'vil_tiny"),
        ({"model": "yolov8n.pt"}, "not the name of a backbone"),
        ({"model": "timm:resnt50"}, "'timm:resnet50'"),
        ({"device": 99}, "cuda:99"),
        ({"detector": "retinaned"}, "'retinanet'"),
        ({"config": "retinanet/vil_tiny_rpb1x"}, "'retinanet/vil_tiny_rpb_1x'"),
        ({"config": "retinanet/vil_tiny_rpb_1x", "model": "lit_ti"}, "config"),
        ({"config": "modern/mask_rcnn_vil_small_rpb", "image_size": 640}, "INPUT.LSJ.SIZE"),
        ({"MODEL.RETINANET.NUM_CLASSES": 7}, "MODEL.RETINANET.NUM_CLASSES"),
        ({"weights": "absent.pth"}, "absent.pth"),
        ({"epochs": 0}, "epochs=0 is not valid"),
        ({"num_gpus": 0}, "--num-gpus is 0"),
        ({"workers": -1}, "DATALOADER.NUM_WORKERS is -1"),
        ({"lr": float("nan"), "workers": 0}, "SOLVER.BASE_LR is nan"),
        ({"epochs": 3, "SOLVER.MAX_ITER": 4}, "epochs"),
    ],
)
def test_mistakes_leave_nothing(data, arguments, named, capsys):
    assert named in message(train, data, **arguments)
    # These errors come before the data is read.
    assert not (arguments.keys() & {"model", "device", "workers"} and capsys.readouterr().out)
    assert not list((data.parent / "work").glob("output/*"))


def write_voc(folder: Path, images: list[Path], *, left: int = 2) -> Path:
    """Write a dataset in Pascal VOC format with one box per image."""
    folder.mkdir()
    for path in images:
        shutil.copy(path, folder)
        corners = f"<xmin>{left}</xmin><ymin>5</ymin><xmax>10</xmax><ymax>20</ymax>"
        thing = f"<object><name>shape</name><bndbox>{corners}</bndbox></object>"
        (folder / path.with_suffix(".xml").name).write_text(f"<annotation>{thing}</annotation>")
    return folder


def test_no_file_of_the_user_is_replaced(data, trained_run):
    voc = write_voc(data.parent / "voc", sorted((data / "train").iterdir())[:4])
    options = {"config": CONFIGS["retinanet"], "epochs": 1, "batch": 2, **KEYS}
    (voc / "data").mkdir()
    (voc / "data/train.json").write_text("{}")
    other = data.parent / "other"
    (other / "data").mkdir(parents=True)
    (other / "data/train.json").write_text("{}")
    cleaned = data.parent / "fixed/data"
    cleaned.mkdir(parents=True)
    content = json.loads((data / "annotations/instances_train.json").read_text())
    content["info"] = {"description": GENERATOR}
    (cleaned / "train.json").write_text(json.dumps(dict(sorted(content.items(), key=lambda item: item[0] != "info"))))
    for path in (data / "train").iterdir():
        shutil.copy(path, cleaned)
    (data.parent / "project").mkdir()
    (data.parent / "project/config.yaml").write_text("name: mine\n")
    (data.parent / "metrics").mkdir()
    (data.parent / "metrics/metrics.json").write_text("{}\n")
    before = contents_of(data.parent)
    for folder, named in [
        ("voc", "the dataset"),
        ("other", "train.json"),
        ("project", "config.yaml"),
        ("metrics", "metrics.json"),
    ]:
        assert named in message(train, voc, output=data.parent / folder, **options)
    assert named in message(train, output=data.parent / folder, config=CONFIGS["retinanet"], **KEYS)
    assert "train.json" in message(evaluate, trained_run, voc, output=data.parent / "other")
    assert contents_of(data.parent) == before
    # The output is the dataset itself, which an earlier command wrote, or its image folder.
    for source, folder in ((cleaned, data.parent / "fixed"), (data, data / "train")):
        before = contents_of(data.parent)
        assert "dataset" in message(train, source, output=folder, **options) and contents_of(data.parent) == before
    # The run would delete its own weights.
    shutil.copytree(trained_run, "run")
    before, weights = contents_of(Path("run")), Path("run/model_final.pth")
    overwrite = {"output": "run", "weights": weights, "OVERWRITE_OUTPUT_DIR": True}
    assert str(weights) in message(train, data, **overwrite, **options) and contents_of(Path("run")) == before


def test_an_evaluation_with_changes_keeps_the_results_of_the_run(trained_run, data, capsys):
    shutil.copytree(trained_run, "run")
    file = Path("run/evaluation.json")
    before = file.read_bytes()
    plain = evaluate("run", **{"MODEL.DEVICE": "cpu"})
    assert json.loads(file.read_bytes()) == plain and not Path("run/evaluation_overrides").exists()
    file.write_bytes(before)
    results = evaluate("run", **{"TEST.DETECTIONS_PER_IMAGE": 1})
    assert json.loads(Path("run/evaluation_overrides/evaluation.json").read_text()) == results != plain
    assert file.read_bytes() == before and "written to 'run/evaluation_overrides'" in capsys.readouterr().out
    first, *_, last = sorted(path.stem for path in Path("run").glob("model_*.pth"))
    assert evaluate(f"run/{first}.pth") == Run(Path(f"run/evaluation_{first}")).results
    assert file.read_bytes() == before and f"written to 'run/evaluation_{first}'" in capsys.readouterr().out
    Path("run/model.onnx").touch()
    assert "vil export RUN --evaluate" in message(evaluate, "run/model.onnx")
    assert "Without data" in message(evaluate, "run", images=data)
    file.unlink()
    assert evaluate(f"run/{last}.pth") == plain == json.loads(file.read_bytes())


def test_a_resume_continues_the_same_run_only(data, request, capsys):
    images = sorted((data / "train").iterdir())
    voc, other = (write_voc(data.parent / name, images[:6], left=left) for name, left in (("voc", 2), ("other", 3)))
    options = {"config": CONFIGS["retinanet"], "output": "run", **KEYS, "SOLVER.MAX_ITER": 1}
    options |= {"SOLVER.BASE_LR": 1e-5, "SOLVER.BASE_LR_END": 2e-6}
    train(voc, batch=2, **options)
    before = contents_of(Path("run"))
    for changed, named in [
        ({"data": other}, (str(other), str(voc))),
        ({"val_fraction": 0.5}, (str(voc), "has changed")),
        ({"batch": 4}, ("SOLVER.IMS_PER_BATCH is 4", "began with 2")),
        ({"config": CONFIGS["mask_rcnn"]}, ("RetinaNet", "Mask R-CNN")),
        ({"DATASETS.TRAIN": "('run_val',)"}, ("run_val", "run_train")),
    ]:
        text = message(train, **({"data": voc, "batch": 2, "resume": True} | options | changed))
        assert all(word in text for word in named) and "run" in text, text
    shutil.copy(images[6], voc)
    shutil.copy((voc / images[0].name).with_suffix(".xml"), (voc / images[6].name).with_suffix(".xml"))
    assert "has changed" in message(train, voc, resume=True, **options)
    # In this process, the log is still open.
    assert contents_of(Path("run")) | {"log.txt": ""} == before | {"log.txt": ""}
    # Without DATA, the run resumes with its original images.
    resumed = train(output="run", resume=True, **{"SOLVER.MAX_ITER": 2, "SOLVER.BASE_LR": 1e-6})
    solver = load_config(resumed.folder / "config.yaml").SOLVER
    assert (solver.MAX_ITER, solver.BASE_LR_END) == (2, pytest.approx(2e-7))
    train(config=load_config("run/config.yaml"), resume=True)
    assert "a new run starts" not in capsys.readouterr().out
    # Without DATA and without a run, the default would be a new run on COCO.
    (data.parent / "work/typo").mkdir()
    for folder in ("rnu", "typo"):
        text = message(train, output=folder, resume=True, **KEYS)
        assert f"'{folder}' has no run to resume" in text and "--output, such as 'run'." in text
    assert not list(Path("typo").iterdir()) and not Path("rnu").exists()
    assert "has no run to resume" in message(train, voc, resume=True, **(options | {"output": None}))
    started = train(voc, batch=2, resume=True, **(options | {"output": "typo"}))
    assert (started.folder / "model_final.pth").exists() and "so a new run starts" in capsys.readouterr().out
    # With a model or a detector, it is the first start of a job on COCO.
    started = request.getfixturevalue("started")
    for given in ({"model": TINY}, {"detector": "faster_rcnn"}):
        train(output="rnu", resume=True, device="cpu", **given)
    assert [cfg.DATASETS.TRAIN for cfg in started] == [("coco_2017_train",)] * 2


@pytest.mark.parametrize("module", ["run", "utils"])
def test_a_run_that_waited_for_another_does_not_train_over_it(data, trained_run, monkeypatch, module):
    """Another run finishes after the first checks of this run, but before this run has the lock."""

    @contextlib.contextmanager
    def wait_for_the_other(folder):
        shutil.copytree(trained_run, folder, dirs_exist_ok=True)
        with run_lock(folder):
            yield

    monkeypatch.setattr(f"projects_vil.{module}.run_lock", wait_for_the_other)
    voc = write_voc(data.parent / "voc", sorted((data / "train").iterdir())[:4])
    text = message(train, voc, config=CONFIGS["retinanet"], output="run", epochs=1, batch=2, **KEYS)
    assert "has checkpoints of another run" in text
    assert Path("run/data").exists() == (module == "utils")  # in the process that trains
    assert Path("run/model_final.pth").read_bytes() == (trained_run / "model_final.pth").read_bytes()


def test_errors_in_the_data_of_another_format(data):
    """The message has the path of the dataset, not the path of a COCO file that is deleted at the end."""
    folder = write_voc(data.parent / "voc", sorted((data / "train").iterdir())[:4])
    min(folder.glob("*.jpg")).write_bytes(b"")
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
