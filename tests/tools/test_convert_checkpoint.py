"""tools/convert_checkpoint.py: the converted file, its report, and errors."""

import json

import pytest
import torch

from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from backbones.convert import convert_state_dict
from projects_vil.checkpoint import METADATA_KEY
from tests import layouts
from tests.backbones import official, official_lit
from tests.backbones.helpers import assert_all_close
from tests.projects_vil.helpers import error_of, run_tool

TOOL, VARIANT = "convert_checkpoint.py", "vil_tiny_1_1_3_1_rpb"


def test_the_file_the_report_and_the_metadata(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "lit_small", official_lit.S)
    source, output, report_file = (tmp_path / name for name in ("official.pth", "ours.safetensors", "report.json"))
    weights = official_lit.official_state_dict(official_lit.S, classifier=True)
    torch.save(layouts.lit_classifier(weights), source)
    arguments = ["--model", "lit_small", "--classifier", "--image-size", 64, 64, "--json", report_file]
    status, out, err = run_tool(TOOL, source, output, *arguments)
    assert status == 0, err
    options = {"num_classes": 10, "img_size": 64}
    expected, _ = convert_state_dict(weights, "lit_small", classifier=True, model_options=options)
    assert_all_close(read_checkpoint(output)["model"], expected, tolerance=0)
    report, saved = json.loads(report_file.read_text()), read_checkpoint(output)[METADATA_KEY]
    assert report["summary"] in out.splitlines()[0] and str(output) in out
    listed = {name for action in ("mapped", "split", "tied", "dropped") for name in report[action]}
    assert weights.keys() <= listed and {"resized", "initialized"} <= report.keys()
    assert saved["variant"] == "lit_small" and saved["source"] == report["source"] == "LIT"
    assert saved["input"]["format"] == "RGB" and "vil-detectron2" in saved["versions"]
    # The converted file is not an official checkpoint.
    assert output.name in error_of(TOOL, output, tmp_path / "b.pth", "--model", "lit_small")


@pytest.mark.parametrize(
    "output, arguments, named",
    [
        ("a.pth", ["--model", "vil_tinny"], "'vil_tiny'"),
        ("a.pth", ["--model", "vil_small_rpb"], "layer1.0.cls_token"),
        ("a.pth", ["--model", VARIANT, "--image-size", "0", "224"], "--image-size"),
        ("a.pth", ["--model", VARIANT, "--json", "absent/report.json"], "absent/report.json"),
        ("a.pth", ["--model", VARIANT, "--json", "official.pth"], "--json"),
        ("a.txt", ["--model", VARIANT], "a.txt"),
        ("official.pth", ["--model", VARIANT], "official.pth"),
    ],
)
def test_invalid_arguments(tmp_path, output, arguments, named):
    source = tmp_path / "official.pth"
    torch.save(layouts.vision_longformer(official.official_state_dict(relative_bias=True)), source)
    before = source.read_bytes()
    arguments = [source if argument == "official.pth" else argument for argument in arguments]
    assert named in error_of(TOOL, source, tmp_path / output, *arguments)
    assert list(tmp_path.iterdir()) == [source] and source.read_bytes() == before
