"""The tools as a user runs them, and what they say where something is wrong."""

import json
import runpy
import shutil
import sys

import cv2
import pytest
import torch

from projects_vil import load_config
from projects_vil.checkpoint import build_detector
from projects_vil.export import ExportedModel
from projects_vil.export.images import example_image
from projects_vil.export.proof.report import eager_detections
from tests.projects_vil.helpers import (
    CONFIGS,
    ROOT,
    SMALL,
    error_line,
    lively_detector,
    run_tool,
    small_config,
)

TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))
CONFIG = CONFIGS["retinanet"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A tool's ending in this process, several seconds faster: exit status, stdout and stderr."""

    def run(name: str, *args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        status = 0
        try:
            runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
        except SystemExit as end:
            status = end.code
        return status or 0, *capsys.readouterr()

    return run


@pytest.fixture
def mistake(run_here):
    """The one line that a tool says about a mistake."""

    def run(name: str, *args) -> str:
        status, _, err = run_here(name, *args)
        assert status == 1
        *said, line = err.splitlines()
        # What a tool logged may stand before, as on which device it is.
        assert line.startswith("error: ") and all(text.startswith(("on ", "warning: ")) for text in said), err
        return line.removeprefix("error: ")

    return run


# -- all goes well ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOOLS)
def test_help_has_an_example(run_here, name):
    status, out, _ = run_here(name, "--help")
    assert status == 0
    assert "example:" in out.lower() and f"python tools/{name}" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_starts_in_an_interpreter_of_its_own(name):
    result = run_tool(name, "--help", fresh=True)
    assert result.returncode == 0 and f"python tools/{name}" in result.stdout, result.stderr
    assert "Warning" not in result.stderr


def test_make_shapes_dataset(tmp_path):
    result = run_tool(
        "make_shapes_dataset.py", tmp_path / "shapes", "--num-train", 3, "--num-val", 2, "--short-side", 40
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("wrote 3 train and 2 val images")
    assert len(list((tmp_path / "shapes/train").iterdir())) == 3


def test_make_shapes_dataset_with_label_images(run_here, tmp_path):
    few = ["--task", "sem_seg", "--num-train", 3, "--num-val", 2, "--short-side", 40]
    status, out, _ = run_here("make_shapes_dataset.py", tmp_path / "shapes_sem_seg", *few)
    assert status == 0 and out.startswith("wrote 3 train and 2 val images")
    assert len(list((tmp_path / "shapes_sem_seg/annotations/training").glob("*.png"))) == 3


def test_make_coco_subset(shapes, tmp_path, run_here):
    source = shapes / "annotations/instances_train.json"
    status, out, _ = run_here("make_coco_subset.py", source, tmp_path / "four.json", "--num-images", 4)
    assert (status, out) == (0, f"wrote {tmp_path / 'four.json'}: 4 images\n")
    assert len(json.loads((tmp_path / "four.json").read_text())["images"]) == 4


@pytest.mark.slow
def test_export_model(tmp_path):
    torch.save({"model": lively_detector(small_config()).state_dict()}, tmp_path / "weights.pth")
    arguments = ["--config-file", CONFIG, "--weights", tmp_path / "weights.pth", "--output", tmp_path / "export"]
    result = run_tool("export_model.py", *arguments, "--opts", *SMALL["retinanet"])
    assert result.returncode == 0, result.stderr
    *rows, measured, last = result.stdout.splitlines()
    assert len(rows) == 4 and all(row.endswith("; equal") for row in rows)
    assert measured.startswith("model.ts: ") and " MB, fp32; 64 x 96: " in measured
    assert last == f"wrote {tmp_path / 'export' / 'model.ts'}"
    report = json.loads((tmp_path / "export/model.ts.report.json").read_text())
    assert report["ok"] and [image["ok"] for image in report["images"]] == [True] * 4
    image = example_image(50, 75)
    detector = build_detector(small_config(), tmp_path / "weights.pth")
    ours, theirs = eager_detections(detector, image), ExportedModel(tmp_path / "export/model.ts")(image)
    assert ours.keys() == theirs.keys() and len(ours["scores"]) >= 10
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-2)


@pytest.mark.slow
def test_export_model_takes_every_option(run_here, tmp_path):
    torch.save({"model": lively_detector(small_config()).state_dict()}, tmp_path / "weights.pth")
    arguments = ["--config-file", CONFIG, "--weights", tmp_path / "weights.pth", "--output", tmp_path / "export"]
    arguments += ["--format", "torchscript", "--precision", "bf16", "--input-dtype", "float32", "--batched"]
    cv2.imwrite(str(tmp_path / "photo.png"), example_image(50, 75).permute(1, 2, 0).numpy())
    status, out, _ = run_here(
        "export_model.py", *arguments, "--images", tmp_path / "photo.png", "--opts", *SMALL["retinanet"]
    )
    path = tmp_path / "export/model_batched_bf16_float32.ts"
    report = json.loads((tmp_path / "export/model_batched_bf16_float32.ts.report.json").read_text())
    assert status == (0 if report["ok"] else 1) and out.splitlines()[-1] == f"wrote {path}"
    # The image stands first and second in a batch.
    assert report["precision"] == "bf16" and [row["height"] for row in report["images"]] == [64, 64]
    metadata = json.loads((tmp_path / "export/model_batched_bf16_float32.ts.metadata.json").read_text())
    assert metadata["input"]["batched"] and metadata["input"]["dtype"] == "float32"


def test_visualize_results(trained_run, datasets_root, tmp_path):
    arguments = ["--run", trained_run, "--output", tmp_path / "drawn.png", "--num-images", 3]
    result = run_tool("visualize_results.py", *arguments, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    ap = json.loads((trained_run / "evaluation.json").read_text())["shapes_val"]["bbox"]["AP"]
    first, second = result.stdout.splitlines()[-2:]
    assert first == f"box AP {ap:.1f}   (shapes_val, 8 images)"
    assert second.startswith(f"results in {trained_run}: ") and "drawn.png" in second
    assert cv2.imread(str(tmp_path / "drawn.png")).std() > 10


def test_analyze_model(tmp_path):
    arguments = ["--config-file", CONFIG, "--size", 64, 96, "--json", tmp_path / "counts.json"]
    result = run_tool("analyze_model.py", *arguments, "--opts", *SMALL["retinanet"])
    assert result.returncode == 0, result.stderr
    (content,) = json.loads((tmp_path / "counts.json").read_text())
    assert content["name"] == str(CONFIG) and content["size"] == [64, 96]
    assert content["total"] == sum(content["parameters"].values()) > 1e6
    assert content["flops"] == sum(content["flops_by_operator"].values()) > 1e6
    assert result.stdout.startswith(f"{CONFIG}\n") and f"{content['total'] / 1e6:.3f} M" in result.stdout
    assert "attention" in result.stdout and "64 x 96" in result.stdout


def test_analyze_model_makes_a_table_of_several(run_here):
    demo = [CONFIGS["retinanet"], CONFIGS["mask_rcnn"]]
    status, out, _ = run_here("analyze_model.py", "--no-flops", "--config-file", *demo)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["config", *map(str, demo)]


@pytest.fixture
def photo(tmp_path):
    """A file of 50 x 75 pixels."""
    pixels = example_image(50, 75).permute(1, 2, 0).numpy()
    cv2.imwrite(str(tmp_path / "photo.png"), pixels)
    return tmp_path / "photo.png"


def test_visualize_attention(trained_run, photo, tmp_path):
    arguments = ["--config-file", trained_run / "config.yaml", "--weights", trained_run / "model_final.pth"]
    arguments += ["--input", photo, "--output", tmp_path / "drawn", "--stage", 3, "--block", 2, "--point", 20, 30]
    result = run_tool("visualize_attention.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {tmp_path}/drawn/photo_vil_tiny_1_1_3_1_rpb_stage3_block2_20_30.png\n"
    assert "random" not in result.stderr
    assert cv2.imread(str(tmp_path / "drawn/photo_vil_tiny_1_1_3_1_rpb_stage3_block2_20_30.png")).std() > 10


def test_visualize_offsets_with_random_and_with_given_weights(run_here, photo, tmp_path, caplog):
    lit = [*SMALL["retinanet"], "MODEL.TRANSFORMER.NAME", "lit_ti"]
    arguments = ["--config-file", CONFIG, "--input", photo, "--output", tmp_path / "drawn", "--point", 20, 30]
    drawing = tmp_path / "drawn/photo_offsets.png"
    status, out, _ = run_here("visualize_offsets.py", *arguments, "--opts", *lit)
    assert (status, out) == (0, f"wrote {drawing}\n")
    assert [record.getMessage() for record in caplog.records if "random" in record.getMessage()] == [
        "no weights were given (--weights): those of the model are random"
    ]
    regular = cv2.imread(str(drawing))
    caplog.clear()

    state_dict = lively_detector(small_config("retinanet", *lit)).state_dict()
    state_dict["backbone.bottom_up.net.stages.1.patch_embed.offset.bias"] += 1
    torch.save({"model": state_dict}, tmp_path / "weights.pth")
    arguments += ["--weights", tmp_path / "weights.pth"]
    assert run_here("visualize_offsets.py", *arguments, "--opts", *lit)[0] == 0
    assert not any("random" in record.getMessage() for record in caplog.records)
    assert (cv2.imread(str(drawing)) != regular).any()


def test_visualize_data(run_here, shapes, tmp_path):
    keys = ["INPUT.AUGMENTATION", "strong", "INPUT.LSJ.SIZE", 64, "SOLVER.IMS_PER_BATCH", 2]
    arguments = ["--config-file", CONFIGS["mask_rcnn"], "--output", tmp_path / "drawn", "--number", 2, *keys]
    status, out, _ = run_here("visualize_data.py", *arguments)
    paths = sorted((tmp_path / "drawn").iterdir())
    assert (status, out) == (0, "".join(f"wrote {path}\n" for path in paths)) and len(paths) == 2
    assert all(cv2.imread(str(path)).std() > 10 for path in paths)


# -- mistakes, in a process ------------------------------------------------------------------------


def test_unreadable_image_in_a_workers_process(datasets_root, tmp_path):
    shutil.copytree(datasets_root / "shapes", tmp_path / "shapes")
    for path in (tmp_path / "shapes/train").iterdir():
        path.write_bytes(path.read_bytes()[:600])
    overrides = [*SMALL["retinanet"], "DATALOADER.NUM_WORKERS", "1", "OUTPUT_DIR", tmp_path / "run"]
    result = run_tool("train_net.py", "--config-file", CONFIG, *overrides, datasets_root=tmp_path)
    assert error_line(result).startswith(f"error: cannot read the image {tmp_path}/shapes/train/0000")


def test_unknown_variant(datasets_root, tmp_path):
    overrides = ["MODEL.TRANSFORMER.NAME", "vil_tinny_rpb", "OUTPUT_DIR", tmp_path]
    result = run_tool("train_net.py", "--config-file", CONFIG, *overrides, datasets_root=datasets_root)
    assert error_line(result) == (
        "error: MODEL.TRANSFORMER.NAME: unknown variant 'vil_tinny_rpb'; did you mean 'vil_tiny_rpb'?"
    )


def test_weights_that_are_none():
    result = run_tool("export_model.py", "--config-file", CONFIG, "--weights", CONFIG, "--output", "unused")
    assert error_line(result).startswith(f"error: {CONFIG} is no checkpoint of tensors only: ")
    assert not (ROOT / "unused").exists()


# -- overrides, the same on every tool --------------------------------------------------------------

_FILE = ["--config-file", CONFIG]
NEEDED = {
    "train_net.py": [*_FILE],
    "analyze_model.py": [*_FILE, "--no-flops"],
    "benchmark.py": ["--models", CONFIG, "--runs", 1],
    "export_model.py": [*_FILE, "--output", "unused"],
    "predict.py": [*_FILE, "--input", "unused", "--output", "unused"],
    "visualize_attention.py": [
        *(*_FILE, "--input", "unused", "--output", "unused", "--stage", 1, "--block", 1, "--point", 1, 1)
    ],
    "visualize_data.py": [*_FILE, "--output", "unused"],
    "visualize_offsets.py": [*_FILE, "--output", "unused", "--input", "unused", "unused"],
}


@pytest.mark.parametrize("word", [[], ["--opts"]])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", NEEDED)
def test_overrides_are_taken_on_every_tool(mistake, name, is_first, word):
    """A key that is none shows that the pairs arrived, and that what stands beside them did not go with them."""
    own, pairs = NEEDED[name], [*word, "SEED", 1, "SOLVER.MAXITER", "-3e-4"]
    text = mistake(name, *(pairs + own if is_first else own + pairs))
    assert text == (
        "unknown config key SOLVER.MAXITER; did you mean 'SOLVER.MAX_ITER'? (among the overrides SEED 1 SOLVER.MAXITER "
        "-3e-4)"
    )


@pytest.mark.parametrize("word", [[], ["--opts"]])
def test_overrides_of_a_runs_drawing(mistake, trained_run, word):
    text = mistake("visualize_results.py", *word, "SOLVER.MAXITER", 3, "--run", trained_run)
    assert text.startswith("unknown config key SOLVER.MAXITER")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a CUDA device")
@pytest.mark.parametrize("name", ["train_net.py", "benchmark.py", "predict.py"])
def test_a_gpu_that_is_not_here(mistake, shapes, name):
    command = NEEDED[name]
    for words in (["MODEL.DEVICE", "cuda"], ["--opts", "MODEL.DEVICE", "cuda"]):
        assert mistake(name, *command, *words).endswith("there is no CUDA device here: add MODEL.DEVICE cpu")
    assert mistake(name, *command, "--device", "cuda").endswith("there is no CUDA device here: use --device cpu")


# -- mistakes, here --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["SOLVER.MAXITER", "3"], "unknown config key SOLVER.MAXITER; did you mean 'SOLVER.MAX_ITER'?"),
        (["SOLVER.MAX_ITER", "many"], "SOLVER.MAX_ITER is many, and it is a whole number, as 320"),
        (["SOLVER.MAX_ITER"], "overrides are keys and values by turns"),
        (["SOLVER.AMP.ENABLED", "True"], "SOLVER.AMP.ENABLED is True, and AMP needs MODEL.DEVICE cuda"),
        (
            ["DATASETS.TRAIN", "('shapes_trian',)"],
            "unknown dataset 'shapes_trian'; did you mean 'shapes_train'?",
        ),
        (["MODEL.WEIGHTS", "absent.pth"], "there is no weights file absent.pth"),
        (["--eval-only"], "MODEL.WEIGHTS is empty"),
        (["--num-gpus", "8"], "--num-gpus is 8, and there are "),
    ],
)
def test_training_says_what_is_wrong(mistake, shapes, tmp_path, overrides, expected):
    options = overrides if overrides[0].startswith("--") else []
    overrides = [] if options else overrides
    arguments = ["--config-file", CONFIG, *options, "OUTPUT_DIR", tmp_path / "run", *overrides]
    assert mistake("train_net.py", *arguments).startswith(expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["annotation file", "image folder"])
def test_training_without_the_dataset(mistake, shapes, tmp_path, monkeypatch, kind):
    if kind == "image folder":
        shutil.copytree(shapes / "annotations", tmp_path / "shapes/annotations")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    text = mistake("train_net.py", "--config-file", CONFIG, "OUTPUT_DIR", tmp_path / "run")
    assert f"the {kind} of shapes_" in text and "DETECTRON2_DATASETS" in text and str(tmp_path) in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["DATASETS.TRAIN", "('ade20k_train',)"], "the image folder of ade20k_train is missing: "),
        (["DATASETS.TRAIN", "('ade20k_trian',)"], "unknown dataset 'ade20k_trian'; did you mean 'ade20k_train'?"),
        (["DATASETS.ADE20K", "[['mine', 'images']]"], "DATASETS.ADE20K has ['mine', 'images']: an entry is "),
        (["DATASETS.ADE20K", "[['mine', 'images', 'labels', 'no.txt']]"], "cannot read the names of classes in no.txt"),
    ],
)
def test_training_a_segmentor_says_what_is_wrong(mistake, shapes_sem_seg, tmp_path, overrides, expected):
    arguments = ["--config-file", CONFIGS["semantic_fpn"], "OUTPUT_DIR", tmp_path / "run", *overrides]
    assert mistake("train_net.py", *arguments).startswith(expected)
    assert not (tmp_path / "run").exists()


def test_a_segmentor_is_not_exported(mistake, tmp_path):
    arguments = ["--config-file", CONFIGS["semantic_fpn"], "--output", tmp_path / "export", "--weights", "absent.pth"]
    assert mistake("export_model.py", *arguments).startswith("a SemanticSegmentor cannot be exported yet")


def test_training_without_a_config(mistake):
    assert mistake("train_net.py").startswith("no config file was given")
    assert mistake("train_net.py", "--config-file", "absent.yaml") == "there is no config file absent.yaml"


def test_training_into_a_file(mistake, shapes, tmp_path):
    (tmp_path / "file").write_text("")
    text = mistake("train_net.py", "--config-file", CONFIG, "OUTPUT_DIR", tmp_path / "file" / "run")
    assert str(tmp_path / "file" / "run") in text


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["--weights", "absent.pth"], "there is no weights file absent.pth"),
        ([], "no weights were given"),
        (["--weights", "absent.pth", "SOLVER.MAXITER", "3"], "unknown config key SOLVER.MAXITER"),
        (["--images", "absent.jpg"], "cannot read the image absent.jpg"),
    ],
)
def test_export_mistakes(mistake, tmp_path, arguments, hint):
    options, overrides = arguments[:2], arguments[2:]
    command = [
        "--config-file",
        CONFIG,
        "--output",
        tmp_path / "export",
        *options,
        "--opts",
        *SMALL["retinanet"],
        *overrides,
    ]
    assert mistake("export_model.py", *command).startswith(hint)
    assert not (tmp_path / "export").exists()


def test_unknown_export_format(run_here, tmp_path):
    status, _, err = run_here("export_model.py", "--config-file", CONFIG, "--output", tmp_path, "--format", "onnxx")
    assert status == 2 and "onnxx" in err.splitlines()[-1] and "torchscript" in err.splitlines()[-1]


def test_analysis_mistakes(mistake, tmp_path):
    assert mistake("analyze_model.py", "--config-file", "absent.yaml") == "there is no config file absent.yaml"
    assert "--size 0 5" in mistake("analyze_model.py", "--config-file", CONFIG, "--size", 0, 5)
    name = ["--opts", "MODEL.TRANSFORMER.NAME", "vil_tinny"]
    assert "did you mean 'vil_tiny'" in mistake("analyze_model.py", "--config-file", CONFIG, *name)


def test_analysis_into_no_folder(mistake, tmp_path):
    path = tmp_path / "absent" / "counts.json"
    assert str(path) in mistake("analyze_model.py", "--no-flops", "--config-file", CONFIG, "--json", path)


def test_visualize_mistakes(mistake, trained_run, shapes, tmp_path):
    assert mistake("visualize_results.py", "--run", tmp_path) == f"there is no config file {tmp_path}/config.yaml"
    shutil.copy(trained_run / "config.yaml", tmp_path)
    assert "coco_instances_results.json" in mistake("visualize_results.py", "--run", tmp_path)
    assert "did you mean 'shapes_val'" in mistake("visualize_results.py", "--run", tmp_path, "--dataset", "shapes_vall")
    assert load_config(tmp_path / "config.yaml").DATASETS.TEST == ("shapes_val",)


def test_dataset_tools_mistakes(mistake, tmp_path):
    assert "--num-train is 0" in mistake("make_shapes_dataset.py", tmp_path / "shapes", "--num-train", 0)
    absent = tmp_path / "absent.json"
    assert str(absent) in mistake("make_coco_subset.py", absent, tmp_path / "out.json")


def test_drawing_mistakes(mistake, run_here, photo, tmp_path):
    small = ["--opts", *SMALL["retinanet"]]
    common = ["--config-file", CONFIG, "--output", tmp_path / "drawn", "--input"]
    where = ["--stage", 3, "--block", 1, "--point", 20, 30]
    assert "ViL has no deformable token merging" in mistake("visualize_offsets.py", *common, photo, *small)
    assert "--stage is 9" in mistake("visualize_attention.py", *common, photo, *where, "--stage", 9, *small)
    for name, options in (("visualize_attention.py", where), ("visualize_offsets.py", [])):
        absent = [*common, tmp_path / "absent.jpg", *options, *small, "MODEL.TRANSFORMER.NAME", "lit_ti"]
        assert f"cannot read the image {tmp_path}/absent.jpg" in mistake(name, *absent)
        unknown = [*common, photo, *options, "--weights", "absent.pth", *small]
        assert "no weights file absent.pth" in mistake(name, *unknown)
    status, _, err = run_here("visualize_offsets.py", *common, photo, "--points", 2, "--point", 1, 2)
    assert status == 2 and "not allowed with" in err
    assert not (tmp_path / "drawn").exists()


@pytest.mark.parametrize("name, way_in", [("train_net.py", "OUTPUT_DIR"), ("visualize_data.py", "--output")])
def test_mistakes_in_augmentation(mistake, shapes, tmp_path, name, way_in):
    common = [name, "--config-file", CONFIG, way_in, tmp_path / "made"]
    text = mistake(*common, "INPUT.AUGMENTATION", "strong")
    assert text.startswith("INPUT.AUGMENTATION strong pastes objects by their masks")
    assert "unknown dataset" in mistake(*common, "DATASETS.TRAIN", "('absent',)")
    text = mistake(*common, *SMALL["retinanet"], "SOLVER.MAX_ITER", 1, "INPUT.LSJ.SIZE", 256)
    assert text.startswith("INPUT.LSJ.SIZE has no effect with INPUT.AUGMENTATION default")
    assert not (tmp_path / "made").exists()
