"""tools/convert_checkpoint.py: the converted file, its report, and exit statuses without an output file."""

import json
import runpy
import sys

import pytest
import torch
from safetensors.torch import save_file

from backbones import create_classifier
from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import convert_state_dict
from projects_vil.checkpoint import METADATA_KEY
from tests import wrapping
from tests.backbones import official, official_lit
from tests.backbones.helpers import assert_all_close
from tests.projects_vil.helpers import ROOT

VARIANT = "vil_tiny_1_1_3_1_rpb"


@pytest.fixture
def convert(monkeypatch, capsys):
    """Run the tool in this process; returns exit status, stdout and stderr."""

    def run(*args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, args)])
        status = 0
        try:
            runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fails(tmp_path, convert):
    """Run the tool on bad input: status 1 or 2, one line on stderr, no file written."""

    def run(*args) -> str:
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        status, out, err = convert(*args)
        assert status in (1, 2) and out == "" and err.startswith("error: ") and err.count("\n") == 1, err
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
        return err

    return run


def vil_classifier() -> dict[str, torch.Tensor]:
    """Float32 weights, as the released ones are."""
    weights = official.official_state_dict(relative_bias=True)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def assert_is_converted(path, weights, name, **options) -> None:
    """The file loads into a classifier, and has the values of the official weights."""
    model = create_classifier(name, **options)
    model.double().load_state_dict(read_checkpoint(path)["model"], strict=True)
    expected, _ = convert_state_dict(weights, name, classifier=True, model_options=options)
    assert_all_close(read_checkpoint(path)["model"], expected, tolerance=0)


@pytest.fixture
def source(tmp_path):
    torch.save(wrapping.vision_longformer(vil_classifier()), tmp_path / "official.pth")
    return tmp_path / "official.pth"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_classifier_has_the_official_values(tmp_path, convert, source, suffix):
    weights, output = vil_classifier(), tmp_path / f"ours{suffix}"
    if suffix == ".safetensors":
        source = tmp_path / "official.safetensors"
        save_file(weights, source)
    status, _, err = convert(source, output, "--model", VARIANT, "--classifier")
    assert status == 0, err
    assert_is_converted(output, weights, VARIANT, num_classes=10)


def test_a_classifier_of_lit(tmp_path, convert, monkeypatch):
    monkeypatch.setitem(VARIANTS, "lit_small", official_lit.S)
    weights = official_lit.official_state_dict(official_lit.S, classifier=True)
    torch.save(wrapping.lit_classifier(weights), tmp_path / "official.pth")
    arguments = ("--model", "lit_small", "--classifier", "--img-size", "64", "64")
    status, _, err = convert(tmp_path / "official.pth", tmp_path / "ours.safetensors", *arguments)
    assert status == 0, err
    assert_is_converted(tmp_path / "ours.safetensors", weights, "lit_small", num_classes=10, img_size=64)


def test_the_report_and_the_metadata(tmp_path, convert, source):
    output = tmp_path / "a.safetensors"
    status, out, err = convert(source, output, "--model", VARIANT, "--json", tmp_path / "report.json")
    assert status == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] in out.splitlines()[0] and str(output) in out.splitlines()[-1]
    listed = {name for action in ("mapped", "split", "tied", "dropped") for name in report[action]}
    assert vil_classifier().keys() <= listed and {"resized", "initialised"} <= report.keys()
    saved = read_checkpoint(output)[METADATA_KEY]
    assert saved["variant"] == VARIANT and saved["source"] == report["source"] == "vision-longformer"
    assert saved["input"]["format"] == "RGB" and "vil-detectron2" in saved["versions"]


@pytest.mark.parametrize(
    "content, named",
    [
        (None, "official.pth"),
        (b"a text file", "official.pth"),
        ({7: torch.zeros(3)}, "official.pth"),
        ({"layer9.0.extra": torch.ones(1)}, "layer9.0.extra"),
        ({"layer1.1.attn.local_relative_position_bias_table": torch.zeros(0, 1)}, "bias_table"),
        ({"layer1.0.proj.weight": torch.full((48, 3, 4, 4), float("nan"))}, "layer1.0.proj.weight"),
        ({"layer1.0.proj.weight": torch.zeros(48, 3, 4, 4).to_sparse()}, "layer1.0.proj.weight"),
    ],
)
def test_files_that_do_not_match(tmp_path, fails, source, content, named):
    source.unlink()
    if isinstance(content, dict):
        torch.save({"net": vil_classifier() | content}, source)
    elif content is not None:
        source.write_bytes(content)
    assert named in fails(source, tmp_path / "a.pth", "--model", VARIANT)


@pytest.mark.parametrize("variant, arguments", [("vil_tiny_rpb", ()), ("lit_ti", ("--classifier",))])
def test_another_variant(tmp_path, fails, source, variant, arguments):
    assert "official.pth" in fails(source, tmp_path / "a.pth", "--model", variant, *arguments)


@pytest.mark.parametrize(
    "output, arguments, named",
    [
        ("a.pth", ["--model", "vil_tinny"], "'vil_tiny'"),
        ("a.pth", ["--model", VARIANT, "--img-size", "0", "224"], "--img-size"),
        ("a.pth", ["--model", VARIANT, "--json", "absent/report.json"], "absent/report.json"),
        ("a.pth", ["--model", VARIANT, "--json", "official.pth"], "--json"),
        ("a.txt", ["--model", VARIANT], "a.txt"),
        ("folder.pth", ["--model", VARIANT], "folder.pth"),
        ("official.pth", ["--model", VARIANT], "official.pth"),
    ],
)
def test_arguments_that_cannot_work(tmp_path, fails, source, output, arguments, named):
    (tmp_path / "folder.pth").mkdir()
    arguments = [str(source) if argument == "official.pth" else argument for argument in arguments]
    assert named in fails(source, tmp_path / output, *arguments)


def test_checkpoints_of_other_projects(tmp_path, fails, convert, source):
    assert convert(source, tmp_path / "a.pth", "--model", VARIANT)[0] == 0
    assert "a.pth" in fails(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT)
    torch.save(wrapping.detectron2_detector(vil_classifier()), tmp_path / "detector.pth")
    assert "classifi" in fails(tmp_path / "detector.pth", tmp_path / "b.pth", "--model", VARIANT, "--classifier")
