"""tools/convert_checkpoint.py: the converted file, its report, and errors."""

import json

import pytest
import torch

from backbones import create_classifier
from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import convert_state_dict
from projects_vil.checkpoint import METADATA_KEY
from tests import layouts
from tests.backbones import official, official_lit
from tests.backbones.helpers import assert_all_close

TOOL, VARIANT = "convert_checkpoint.py", "vil_tiny_1_1_3_1_rpb"


def vil_classifier() -> dict[str, torch.Tensor]:
    """Return weights in float32, like the released checkpoints."""
    weights = official.official_state_dict(relative_bias=True)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def assert_is_converted(path, weights, name, **options) -> None:
    """Check that the file loads into a classifier and has the values of the official weights."""
    model = create_classifier(name, **options)
    model.double().load_state_dict(read_checkpoint(path)["model"], strict=True)
    expected, _ = convert_state_dict(weights, name, classifier=True, model_options=options)
    assert_all_close(read_checkpoint(path)["model"], expected, tolerance=0)


@pytest.fixture
def source(tmp_path):
    torch.save(layouts.vision_longformer(vil_classifier()), tmp_path / "official.pth")
    return tmp_path / "official.pth"


def test_a_classifier_has_the_official_values(tmp_path, run_here, monkeypatch):
    monkeypatch.setitem(VARIANTS, "lit_small", official_lit.S)
    weights = official_lit.official_state_dict(official_lit.S, classifier=True)
    torch.save(layouts.lit_classifier(weights), tmp_path / "official.pth")
    arguments = ("--model", "lit_small", "--classifier", "--image-size", "64", "64")
    status, _, err = run_here(TOOL, tmp_path / "official.pth", tmp_path / "ours.safetensors", *arguments)
    assert status == 0, err
    assert_is_converted(tmp_path / "ours.safetensors", weights, "lit_small", num_classes=10, img_size=64)


def test_the_report_and_the_metadata(tmp_path, run_here, error_of, source):
    output = tmp_path / "a.safetensors"
    status, out, err = run_here(TOOL, source, output, "--model", VARIANT, "--json", tmp_path / "report.json")
    assert status == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] in out.splitlines()[0] and str(output) in out.splitlines()[-1]
    listed = {name for action in ("mapped", "split", "tied", "dropped") for name in report[action]}
    assert vil_classifier().keys() <= listed and {"resized", "initialized"} <= report.keys()
    saved = read_checkpoint(output)[METADATA_KEY]
    assert saved["variant"] == VARIANT and saved["source"] == report["source"] == "vision-longformer"
    assert saved["input"]["format"] == "RGB" and "vil-detectron2" in saved["versions"]
    # The converted file is not an official checkpoint.
    assert "a.safetensors" in error_of(TOOL, output, tmp_path / "b.pth", "--model", VARIANT)


@pytest.mark.parametrize(
    "content, named",
    [
        (b"a text file", "official.pth"),
        ({7: torch.zeros(3)}, "official.pth"),
        ({"layer9.0.extra": torch.ones(1)}, "layer9.0.extra"),
        ({"layer1.1.attn.local_relative_position_bias_table": torch.zeros(0, 1)}, "bias_table"),
        ({"layer1.0.proj.weight": torch.zeros(48, 3, 4, 4).to_sparse()}, "layer1.0.proj.weight"),
    ],
)
def test_files_that_do_not_match(tmp_path, error_of, source, content, named):
    if isinstance(content, dict):
        torch.save({"net": vil_classifier() | content}, source)
    else:
        source.write_bytes(content)
    assert named in error_of(TOOL, source, tmp_path / "a.pth", "--model", VARIANT)
    assert [path.name for path in tmp_path.iterdir()] == ["official.pth"]


@pytest.mark.parametrize(
    "output, arguments, named",
    [
        ("a.pth", ["--model", "vil_tinny"], "'vil_tiny'"),
        ("a.pth", ["--model", VARIANT, "--image-size", "0", "224"], "--image-size"),
        ("a.pth", ["--model", VARIANT, "--json", "absent/report.json"], "absent/report.json"),
        ("a.pth", ["--model", VARIANT, "--json", "official.pth"], "--json"),
        ("a.txt", ["--model", VARIANT], "a.txt"),
        ("folder.pth", ["--model", VARIANT], "folder.pth"),
        ("official.pth", ["--model", VARIANT], "official.pth"),
    ],
)
def test_arguments_that_cannot_work(tmp_path, error_of, source, output, arguments, named):
    (tmp_path / "folder.pth").mkdir()
    before = source.read_bytes()
    arguments = [source if argument == "official.pth" else argument for argument in arguments]
    assert named in error_of(TOOL, source, tmp_path / output, *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {
        "official.pth",
        "folder.pth",
    } and source.read_bytes() == before
