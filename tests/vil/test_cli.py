"""The ``vil`` command: a complete workflow, and an installation from a wheel."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from backbones.errors import GENERATOR
from projects_vil import Run
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, vil


def test_from_photos_to_predictions(shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shapes, "mine")
    assert "' on a GPU: objects" in vil("check", "mine/annotations/instances_val.json", "--images", "mine")[1]
    small = [*SMALL["retinanet"], "--batch", 8]
    status, out, err = vil("train", "mine", "--config", CONFIGS["retinanet"], "--epochs", 2, *small)
    run = "output/mine_retinanet_vil_shapes"
    assert status == 0 and "mine is COCO" in out and "runs on the CPU" in err, err
    # The output suggests the next commands.
    assert all(f"{command} {run}" in out for command in ("vil predict", "vil report"))
    evaluation = json.loads((tmp_path / run / "evaluation.json").read_text())
    # The command also works from another folder, and with a number as the name of the output folder.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert vil("eval", f"../{run}", "--output", "2024")[0] == 0
    assert json.loads((tmp_path / "elsewhere/2024/evaluation.json").read_text()) == evaluation
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/val/text.jpg").write_text("not an image")
    status, out, err = vil("predict", run, "mine/val", "--output", "found", "--batch", 2)
    assert status == 2 and "text.jpg" in err and json.loads((tmp_path / "found/results.json").read_text())
    assert "8 images, " in out and "found/drawings" in out and len(list((tmp_path / "found/drawings").iterdir())) == 8
    for words in (("eval", "absent"), ("predict", "absent", "mine/val"), ("export", "absent")):
        status, _, err = vil(*words)
        assert status == 2 and "absent" in err.splitlines()[-1], err
    mistakes = {"eval": "MODEL", "eval --lr 1": "not train", "train": "Give a dataset", "detect": "mean 'predict'?"}
    mistakes |= {f"{command} mine {run}": f"Write vil {command} {run} mine" for command in ("eval", "predict")}
    mistakes |= {f"{command} --output found/results.json": "is a file" for command in ("tune mine", f"export {run}")}
    for words, named in mistakes.items():
        status, _, err = vil(*words.split())
        assert status == 2 and named in err, err


def test_check_replaces_no_annotations_and_writes_no_empty_dataset(shapes, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "mine")
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    lists = {key: content[key] for key in ("images", "annotations", "categories")}
    content = {"info": {"description": GENERATOR}} | lists
    file = tmp_path / "mine/train.json"
    file.write_text(json.dumps(content))
    status, _, err = vil("check", tmp_path / "mine", "--json", file)
    assert status == 1 and str(file) in err and json.loads(file.read_text()) == content
    for entry in (*content["categories"], *content["annotations"]):
        key = "id" if "name" in entry else "category_id"
        entry[key] = f"class {entry[key]}"
    file.write_text(json.dumps(content))
    status, _, err = vil("check", tmp_path / "mine", "--fix", tmp_path / "fixed")
    assert status == 1 and "would have no annotations" in err and not list(tmp_path.glob("fixed/*.json"))


def test_check_fails_for_what_stops_the_training(shapes, tmp_path):
    shutil.copytree(shapes, tmp_path / "mine")
    files = [tmp_path / f"mine/annotations/instances_{split}.json" for split in ("val", "train")]
    val, train = (json.loads(file.read_text()) for file in files)
    val["categories"] = [entry | {"name": f"my {entry['name']}"} for entry in train["categories"]]
    broken = {"annotations": [entry | {"bbox": None} for entry in train["annotations"]]}
    for change, named in (({}, "'my circle'"), (broken, "four finite numbers")):
        for file, content in zip(files, (val, train | change), strict=True):
            file.write_text(json.dumps(content))
        for command in ("check", "train"):
            status, out, err = vil(command, tmp_path / "mine")
            assert status == 1 and named in out + err, command
        val["categories"] = train["categories"]
    # The advice has the dataset, not one of its files.
    assert f"vil check {tmp_path / 'mine'} " in err


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"bbox": {"AP": 4.9, "AP50": 9}, "segm": {"AP": None}}, "bbox of mine: AP 4.9 %, AP50 9.0 %. This is low."),
        ({"bbox": {"AP": None}}, "bbox of mine: AP is undefined, because the validation images have no objects."),
        ({"bbox": {"AP": 5.0, "AP50": 9.0}}, "bbox of mine: AP 5.0 %, AP50 9.0 %\nNext: vil predict"),
        ({"sem_seg": {"mIoU": 3.0}}, "Next: vil predict"),
    ],
)
def test_the_advice_after_training(tmp_path, monkeypatch, tasks, expected):
    (tmp_path / "evaluation.json").write_text(json.dumps({"mine": tasks}))
    monkeypatch.setattr("projects_vil.run.train", lambda data, **_: Run(tmp_path))
    monkeypatch.setattr("projects_vil.run.evaluate", lambda model, **_: {"mine": tasks})
    (tmp_path / "config.yaml").touch()
    trained, evaluated = (vil(command, tmp_path)[1] for command in ("train", "eval"))
    assert trained.startswith(expected) and trained.partition("Next")[0] == evaluated
    (tmp_path / "last_checkpoint").touch()
    assert f"DATA --weights {tmp_path}" in vil("train", tmp_path, "photos")[2]


@pytest.mark.slow
def test_export(trained_run, tmp_path):
    status, out, err = vil("export", trained_run, "--format", "torchscript", "--output", tmp_path / "export")
    assert status == 0 and (tmp_path / "export/model.ts").is_file() and "equal" in out and "parity check ..." in err


@pytest.mark.slow
def test_a_wheel_contains_all_files_of_the_command(tmp_path):
    """The wheel is installed in a separate folder. It uses the libraries of the environment."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    ignored = shutil.ignore_patterns(".*", "build", "output", "datasets", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, tmp_path / "source"]
    subprocess.run(wheel, check=True, timeout=300)
    (built,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", target, built], check=True, timeout=300)
    configs = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    installed = target / "projects_vil/configs"
    assert {path.relative_to(installed) for path in installed.rglob("*.yaml")} == configs
    assert (target / "projects_vil/examples/quickstart.ipynb").is_file()
    code = "import projects_vil.config as module; print(module.__file__, module.config_path('mask_rcnn/lit_s_1x'))"
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(target)}, "text": True, "timeout": 300}
    printed = subprocess.check_output([sys.executable, "-c", code], **options).split()
    assert all(path.startswith(str(target)) for path in printed)
    command = [target / "bin/vil", "train", "--config", "retinanet/vil_tiny_rpb_1x", "--output", "run"]
    result = subprocess.run([sys.executable, *command], capture_output=True, **options)
    assert result.returncode == 1 and "coco_2017_val" in result.stderr.splitlines()[-1]
