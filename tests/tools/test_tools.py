"""The files, output and errors of the tools."""

import json
import shutil

import cv2
import pytest
import torch

from projects_vil.export import ExportedModel, example_image
from projects_vil.export.parity import TOLERANCES
from tests.projects_vil.helpers import CONFIGS, SMALL, error_of, forkserver, run_tool, small_config, untrained_detector

CONFIG = CONFIGS["retinanet"]


@pytest.fixture
def photo(tmp_path):
    """Return an image file of 50 x 75 pixels."""
    cv2.imwrite(str(tmp_path / "photo.png"), example_image(50, 75).permute(1, 2, 0).numpy())
    return tmp_path / "photo.png"


# -- successful commands ---------------------------------------------------------------------------


def test_make_coco_subset(shapes, tmp_path):
    source = shapes / "annotations/instances_train.json"
    assert run_tool("../examples/make_coco_subset.py", source, tmp_path / "four.json", "--num-images", 4)[0] == 0
    assert len(json.loads((tmp_path / "four.json").read_text())["images"]) == 4
    _, out, _ = run_tool("../examples/make_coco_subset.py", source, tmp_path / "all.json", "--num-images", 20)
    assert "16 images" in out and "20" in out


@pytest.mark.slow
def test_export_model_takes_every_option(photo, tmp_path, monkeypatch):
    """The exit status is 1, because the tolerance for scores is negative."""
    monkeypatch.setitem(TOLERANCES, "bf16", TOLERANCES["bf16"] | {"scores": -1.0})
    torch.save({"model": untrained_detector(small_config("mask_rcnn")).state_dict()}, tmp_path / "weights.pth")
    arguments = ["--config-file", CONFIGS["mask_rcnn"], "--weights", tmp_path / "weights.pth", "--parity-images", photo]
    arguments += ["--format", "torchscript", "--precision", "bf16", "--input-dtype", "float32", "--batched"]
    arguments += ["--fixed-detections", "--output", tmp_path / "export", "--opts", *SMALL["mask_rcnn"]]
    status, _, _ = run_tool("export_model.py", *arguments)
    model = ExportedModel(tmp_path / "export/model_batched_bf16_fixed_float32.ts")
    report = json.loads((tmp_path / f"export/{model.path.name}.report.json").read_text())
    assert status == 1 and report["ok"] is False and not any(row["ok"] for row in report["images"])
    # The image is compared at the first and at the second position of a batch.
    assert report["tolerances"] == TOLERANCES["bf16"] and [row["height"] for row in report["images"]] == [64, 64]
    traced = torch.jit.load(model.path)
    assert {parameter.dtype for parameter in traced.parameters()} == {torch.bfloat16}
    # Anchors, mean and standard deviation stay in float32.
    kept = {buffer.dtype for name, buffer in traced.named_buffers() if "anchor" in name or "pixel" in name}
    assert kept == {torch.float32} == {model.dtype}
    assert model.metadata["fixed_detections"] == 100
    assert model.metadata["input"]["shape"] == ["batch", 3, "height", "width"]
    shapes = {output["name"]: output["shape"] for output in model.metadata["outputs"]}
    assert shapes["masks"] == ["batch", 100, 1, 28, 28] and shapes["count"] == ["batch"]
    found = model(torch.stack([example_image(70, 90, seed=seed) for seed in range(3)]).float())
    assert set(found.pop("image_index").tolist()) == {0, 1, 2}
    assert {name for name, value in found.items() if value.dtype == torch.float32} == {"boxes", "scores", "masks"}
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.slow
def test_analyze_model(tmp_path):
    path = tmp_path / "counts.json"
    arguments = ["--config-file", CONFIG, "--image-size", 64, 96, "--json", path]
    status, out, err = run_tool("analyze_model.py", *arguments, "--opts", *SMALL["retinanet"])
    assert status == 0, err
    (content,) = json.loads(path.read_text())["rows"]
    assert content["name"] == str(CONFIG) and content["size"] == [64, 96]
    assert content["total"] > 1e6 and content["flops"] > 1e6
    assert f"{content['parameters']['backbone'] / 1e6:.3f}" in out and "convolution" in out
    status, out, _ = run_tool("analyze_model.py", "--variants", "vil_tiny_2_9", "--json", path)
    row = ["vil_tiny_2_9_1", "6.79", "6.78", "+0.01", "1.37", "1.29", "+0.08", "34.5"]
    assert status == 0 and row in [line.split() for line in out.splitlines()]


@pytest.mark.slow
def test_benchmark(tmp_path, monkeypatch):
    """The memory is measured in forked processes, because each spawned one would import all libraries."""
    context = forkserver()
    monkeypatch.setattr("projects_vil.utils.multiprocessing.get_context", lambda method: context)
    name, path = "vil_tiny_1_1_3_1_rpb", tmp_path / "rows.json"
    arguments = ["--models", name, f"{name}+shift", "--against", "r50", "--backward", "--runs", 2]
    arguments += ["--image-size", 64, 96, "--image-size", 160, 192, "--json", path]
    status, out, err = run_tool("benchmark.py", *arguments)
    assert status == 0, err
    content = json.loads(path.read_text())
    assert [row["model"] for row in content["measurements"]] == [name, f"{name}+shift", "r50"] * 2
    assert {tuple(row["size"]) for row in content["measurements"]} == {(64, 96), (160, 192)}
    assert [row["ratio"] for row in content["measurements"] if row["model"] == "r50"] == [1, 1]
    memory = [row["memory"] for row in content["measurements"] if row["model"] == name]
    assert memory == [None, None] or 0 < memory[0] < memory[1]
    assert out.count("160 x 192") == 3
    status, out, err = run_tool("../research/benchmarks/__main__.py", "growth", path, tmp_path / "growth.png")
    assert status == 0 and all(f"{model}: time grows" in out for model in (name, f"{name}+shift", "r50")), err
    assert cv2.imread(str(tmp_path / "growth.png")).std() > 10, err


def test_visualize(shapes, trained_run, photo, tmp_path):
    """Each command writes PNG files and prints their paths. Random weights cause a warning."""
    image = ["--input", photo, "--output", tmp_path]
    lit = ["--config-file", CONFIG, *SMALL["retinanet"], "MODEL.TRANSFORMER.VARIANT", "lit_ti"]
    attention, token = "photo_vil_tiny_1_1_3_1_rpb_stage{}.png".format, ["--stage", 3, "--block", 2, "--point", 20, 30]
    data = ["data", "--config-file", CONFIGS["mask_rcnn"], "--output", tmp_path / "data", "--number", 2]
    strong = ["INPUT.AUGMENTATION", "lsj_copy_paste", "INPUT.LSJ.SIZE", 64, "SOLVER.IMS_PER_BATCH", 2]
    for words, pattern in (
        (["results", trained_run, "--output", tmp_path / "results.png", "--num-images", 3], "results.png"),
        (["results", shutil.copytree(trained_run, tmp_path / "run")], "run/drawings/predictions.png"),
        (["attention", trained_run, *image, *token], attention("3_block2_20_30")),
        (["attention", trained_run, *image], attention("4_block1_center")),
        (["offsets", *lit, *image, "--points", 2], "photo_offsets.png"),
        ([*data, *strong], "data/*"),
    ):
        status, out, err = run_tool("visualize.py", *words)
        paths = list(tmp_path.glob(pattern))
        assert status == 0 and len(paths) == (2 if words[0] == "data" else 1), err
        assert all(str(path) in out and cv2.imread(str(path)).std() > 10 for path in paths)
        assert ("random" in err) == (words[0] == "offsets")


# -- mistakes of the user --------------------------------------------------------------------------


_FILE = ["--config-file", CONFIG]
_IMAGE = [*_FILE, "--input", CONFIGS["retinanet"].parents[2] / "docs/images/lifeboat.jpg", "--output", "unused"]
NEEDED = {
    "train_net.py": _FILE,
    "analyze_model.py": [*_FILE, "--no-flops"],
    "benchmark.py": ["--models", CONFIG, "--runs", 1],
    "export_model.py": [*_FILE, "--output", "unused"],
    "../examples/plan_schedule.py": [*_FILE, "--epochs", 3],
    "predict.py": _IMAGE,
    "visualize.py attention": [*_IMAGE, "--stage", 1, "--block", 1, "--point", 1, 1],
    "visualize.py data": [*_FILE, "--output", "unused"],
    "visualize.py offsets": _IMAGE,
}


@pytest.mark.parametrize("name, first", [(name, bool(number % 2)) for number, name in enumerate(NEEDED)])
def test_overrides_are_taken_on_every_tool(name, first):
    """The error about an unknown key shows that the pairs and all other arguments were parsed."""
    own, pairs = NEEDED[name], [*(["--opts"] if first else []), "SEED", 1, "SOLVER.MAXITER", "-3e-4"]
    text = error_of(*name.split(), *(pairs + own if first else own + pairs))
    assert "SOLVER.MAXITER" in text and "'SOLVER.MAX_ITER'" in text


def test_training_without_the_dataset(shapes, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for _ in range(2):  # without annotations, then without images
        text = error_of("train_net.py", "--config-file", CONFIG, "OUTPUT_DIR", tmp_path / "run")
        assert str(tmp_path / "shapes") in text and "shapes_" in text and "DETECTRON2_DATASETS" in text
        assert not (tmp_path / "run").exists()
        shutil.copytree(shapes / "annotations", tmp_path / "shapes/annotations", dirs_exist_ok=True)


def test_other_tools_name_what_is_wrong(trained_run, photo, shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--config-file", CONFIG, "--output", "made", *SMALL["retinanet"]]
    lit = ["MODEL.TRANSFORMER.VARIANT", "lit_ti"]
    (tmp_path / "run").mkdir()
    assert "config.yaml, so it is not a run. Give" in error_of("visualize.py", "results", "run")
    shutil.copy(trained_run / "config.yaml", "run")
    (tmp_path / "data.yaml").touch()
    for words, name in (
        (["export_model.py", *small], "MODEL.WEIGHTS"),
        (["visualize.py", "results", "SOLVER.MAXITER", 3, "run"], "SOLVER.MAXITER"),
        (["visualize.py", "data", "SOLVER.MAXITER", 3, "run", "--output", "made"], "SOLVER.MAXITER"),
        (["predict.py", "data.yaml", "run"], "'data.yaml' is not a model, but 'run' is"),
        (["visualize.py", "results", "run", "--dataset", "shapes_vall"], "'shapes_val'"),
        (["visualize.py", "offsets", *small, "--input", photo, "--points", 2, "--point", 1, 2], "--point"),
        (["visualize.py", "offsets", *small, *lit, "--input", photo, "--point", 50, 0], "Point 50 0 is outside"),
    ):
        assert name in error_of(*words)
        assert not (tmp_path / "made").exists()
