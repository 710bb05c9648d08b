"""tools/convert_checkpoint.py: the converted file, its report, and exit statuses without an output file."""

import json
import pickle
import runpy
import sys

import pytest
import torch
from safetensors.torch import save_file

from backbones import create_backbone, create_classifier
from backbones.build import VARIANTS
from backbones.checkpoint_files import read_checkpoint
from projects_vil.checkpoint import METADATA_KEY
from projects_vil.checkpoint.pretrained import BACKBONE_PREFIX
from tests import wrapping
from tests.backbones import official, official_lit
from tests.backbones.helpers import random_images
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil.helpers import ROOT, error_line, run_tool
from tests.selection import slow_except

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


@pytest.fixture
def source(tmp_path):
    torch.save(wrapping.vision_longformer(vil_classifier()), tmp_path / "official.pth")
    return tmp_path / "official.pth"


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, wrap, suffix",
    [("vil_tiny_rpb_det", wrapping.detectron2_detector, ".pth"), ("lit_s_det", wrapping.mmdetection, ".safetensors")],
)
def test_golden_features_by_the_command(tmp_path, file, wrap, suffix):
    reference, variant, output = golden(file), file.removesuffix("_det"), tmp_path / f"ours{suffix}"
    torch.save(wrap(golden_state_dict(reference)), tmp_path / "official.pth")
    result = run_tool("convert_checkpoint.py", tmp_path / "official.pth", output, "--model", variant)
    assert result.returncode == 0, result.stderr
    model = create_backbone(variant).eval()
    state_dict = read_checkpoint(output)["model"]
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    with torch.inference_mode():
        features = model(golden_images(reference))
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(features[stage], expected)


@pytest.mark.parametrize("wrap", [wrapping.vision_longformer, dict, lambda weights: {"model": weights}, None])
def test_a_classifier_computes_what_the_official_one_does(tmp_path, convert, wrap):
    path, weights, outputs = tmp_path / "official.pth", vil_classifier(), []
    if wrap is None:
        path = tmp_path / "official.safetensors"
        save_file(weights, path)
    else:
        torch.save(wrap(weights), path)
    for suffix in (".pth", ".safetensors"):
        output = tmp_path / f"ours{suffix}"
        status, _, err = convert(path, output, "--model", VARIANT, "--classifier")
        assert status == 0, err
        model = create_classifier(VARIANT, num_classes=10).double().eval()
        model.load_state_dict(read_checkpoint(output)["model"], strict=True)
        outputs.append(model(random_images(2, 3, 50, 43)))
    double = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    _, expected = official.official_forward(double, random_images(2, 3, 50, 43))
    torch.testing.assert_close(outputs[0], expected, atol=1e-10, rtol=1e-10)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", ["TI", "S"])
def test_a_classifier_of_lit(tmp_path, convert, monkeypatch, family):
    variant = getattr(official_lit, family)
    monkeypatch.setitem(VARIANTS, "lit_small", variant)
    weights = official_lit.official_state_dict(variant, classifier=True)
    torch.save(wrapping.lit_classifier(weights), tmp_path / "official.pth")
    arguments = ("--model", "lit_small", "--classifier", "--img-size", "64", "64")
    status, _, err = convert(tmp_path / "official.pth", tmp_path / "ours.safetensors", *arguments)
    assert status == 0, err
    model = create_classifier("lit_small", num_classes=10, img_size=64).double().eval()
    model.load_state_dict(read_checkpoint(tmp_path / "ours.safetensors")["model"], strict=True)
    images = random_images(2, 3, 64, 64)
    expected = official_lit.official_forward(weights, images, variant)[1]
    torch.testing.assert_close(model(images), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_report_and_the_metadata(tmp_path, convert, source, suffix):
    output = tmp_path / f"a{suffix}"
    status, out, err = convert(source, output, "--model", VARIANT, "--json", tmp_path / "report.json")
    assert status == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] in out.splitlines()[0] and str(output) in out.splitlines()[-1]
    listed = {name for action in ("mapped", "split", "tied", "dropped") for name in report[action]}
    assert vil_classifier().keys() <= listed and {"resized", "initialised"} <= report.keys()
    saved = read_checkpoint(output)[METADATA_KEY]
    assert saved["variant"] == VARIANT and saved["source"] == report["source"] == "vision-longformer"
    assert saved["input"]["format"] == "RGB" and "vil-detectron2" in saved["versions"]


class Malicious:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    "content",
    [None, b"", b"a text file\n", b"\x80\x04garbage", b"PK\x03\x04 and no more", "folder", "half", "torch", "pickle"],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_that_are_not_checkpoints(tmp_path, fails, source, content, suffix):
    path, executed = tmp_path / f"other{suffix}", tmp_path / "executed"
    contents = {"net": vil_classifier(), "x": Malicious(executed)}
    if content == "folder":
        path.mkdir()
    elif content == "half":
        path.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    elif content == "torch":
        torch.save(contents, path)
    elif content is not None:
        path.write_bytes(pickle.dumps(contents) if content == "pickle" else content)
    assert path.name in fails(path, tmp_path / "a.pth", "--model", VARIANT)
    assert not executed.exists()


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("layer9.0.extra", torch.ones(1)),
        ("layer1.0.proj.bias", torch.ones(3)),
        ("layer1.1.attn.g2l_relative_position_bias", torch.zeros(1)),
        ("layer1.1.attn.local_relative_position_bias_table", torch.zeros(0, 1)),
        ("layer1.0.proj.weight", torch.full((48, 3, 4, 4), float("nan"))),
        ("layer1.0.proj.weight", torch.zeros(48, 3, 4, 4).to_sparse()),
        ("head.bogus", torch.zeros(3)),
        (7, torch.zeros(3)),
    ],
)
def test_tensors_that_do_not_match(tmp_path, fails, name, tensor):
    torch.save({"net": vil_classifier() | {name: tensor}}, tmp_path / "official.pth")
    message = fails(tmp_path / "official.pth", tmp_path / "a.pth", "--model", VARIANT)
    assert "official.pth" in message and str(name) in message


@pytest.mark.parametrize("arguments", [(), ("--classifier",)])
@pytest.mark.parametrize(
    "variant",
    slow_except(
        ["vil_small_1_1_9_1_rpb", "vil_tiny_rpb", "vil_tiny_1_10_1_rpb", "vil_tiny", "lit_s", "lit_ti", "ls_tiny"],
        ["vil_tiny_rpb", "lit_ti"],
    ),
)
def test_another_variant(tmp_path, fails, source, variant, arguments):
    assert "official.pth" in fails(source, tmp_path / "a.pth", "--model", variant, *arguments)


@pytest.mark.parametrize(
    "output, arguments, named",
    [
        ("a.pth", ["--model", "cvt_ls_13"], "cvt_ls_13"),
        ("a.pth", ["--model", "vil_tinny"], "'vil_tiny'"),
        ("a.pth", ["--model", VARIANT, "--img-size", "0", "224"], "--img-size"),
        ("a.pth", ["--model", VARIANT, "--json", "absent/report.json"], "absent/report.json"),
        ("a.pth", ["--model", VARIANT, "--json", "{source}"], "--json"),
        ("a.pth", ["--model", VARIANT, "--json", "{folder}/a.pth"], "--json"),
        ("a.txt", ["--model", VARIANT], "a.txt"),
        ("a", ["--model", VARIANT], "/a"),
        ("absent/a.pth", ["--model", VARIANT], "absent"),
        ("folder.pth", ["--model", VARIANT], "folder.pth"),
        ("official.pth", ["--model", VARIANT], "official.pth"),
    ],
)
def test_arguments_that_cannot_work(tmp_path, fails, source, output, arguments, named):
    (tmp_path / "folder.pth").mkdir()
    arguments = [argument.format(source=source, folder=tmp_path) for argument in arguments]
    assert named in fails(source, tmp_path / output, *arguments)


def test_checkpoints_of_other_projects(tmp_path, fails, convert, source):
    assert convert(source, tmp_path / "a.pth", "--model", VARIANT)[0] == 0
    assert "a.pth" in fails(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT)
    torch.save(wrapping.detectron2_detector(vil_classifier()), tmp_path / "detector.pth")
    assert "classifi" in fails(tmp_path / "detector.pth", tmp_path / "b.pth", "--model", VARIANT, "--classifier")


@pytest.mark.slow
def test_one_line_from_the_command(tmp_path):
    (tmp_path / "official.pth").write_text("a text file")
    result = run_tool("convert_checkpoint.py", tmp_path / "official.pth", tmp_path / "a.pth", "--model", VARIANT)
    assert "official.pth" in error_line(result) and not (tmp_path / "a.pth").exists()
