"""Official checkpoints through the tool: the outputs of the official models, or one line and no file."""

import json
import pickle
import runpy
import sys

import pytest
import torch

from backbones import create_backbone, create_classifier
from backbones.files import read_checkpoint
from backbones.variants import VARIANTS
from projects_vil.conversion import BACKBONE_PREFIX
from projects_vil.provenance import PROVENANCE_KEY, Provenance
from tests import wrapping
from tests.backbones import official, official_lit
from tests.backbones.helpers import random_images
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil.helpers import ROOT, error_line, run_tool

AT_224 = ("--img-size", "224", "224")
# Golden file -> variant, how the official repository wraps it, arguments of the tool, options of the model
GOLDEN = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", wrapping.detectron2_detector, (), {}),
    "vil_small_ape_det": ("vil_small", wrapping.detectron2_detector, (), {}),
    "vil_small_rpb_g1_det": ("vil_small_rpb", wrapping.detectron2_detector, (), {"global_tokens": [1, 1, 1, 1]}),
    "lit_ti_det": ("lit_ti", wrapping.mmdetection, (), {}),
    "lit_s_det": ("lit_s", wrapping.mmdetection, (), {}),
    "vil_small_rpb_cls": ("vil_small_rpb", wrapping.vision_longformer, (), {}),
    "vil_tiny_ape_cls": ("vil_tiny", wrapping.vision_longformer, AT_224, {"max_img_size": 224}),
    "global_tiny_ape_cls": ("global_tiny", wrapping.vision_longformer, AT_224, {"max_img_size": 224}),
    "srformer64_tiny_ape_cls": ("sra64_tiny", wrapping.vision_longformer, AT_224, {"max_img_size": 224}),
    "performer_tiny_ape_cls": ("performer_tiny", wrapping.vision_longformer, AT_224, {"max_img_size": 224}),
    "ls_medium_224_cls": ("ls_medium", wrapping.vision_longformer, (), {}),
    "lit_ti_cls": ("lit_ti", wrapping.lit_classifier, (), None),
    "lit_s_cls": ("lit_s", wrapping.lit_classifier, (), None),
    "linformer_tiny_ape_cls": ("linformer_tiny", wrapping.vision_longformer, (), None),
}
CLASSIFIERS = [name for name in GOLDEN if name.endswith("_cls")]
BACKBONES = [name for name, (*_, options) in GOLDEN.items() if options is not None]
VARIANT = "vil_tiny_1_1_3_1_rpb"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def convert(monkeypatch, capsys):
    """The tool in this process: exit status, stdout and stderr."""

    def run(*args) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, args)])
        status = 0
        try:
            runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


def backbone_of(path, name: str, **options) -> torch.nn.Module:
    model = create_backbone(name, **options).eval()
    state_dict = read_checkpoint(path)["model"]
    model.load_state_dict({key.removeprefix(BACKBONE_PREFIX): t for key, t in state_dict.items()}, strict=True)
    return model


def classifier_of(path, name: str, **options) -> torch.nn.Module:
    model = create_classifier(name, **options).eval()
    model.load_state_dict(read_checkpoint(path)["model"], strict=True)
    return model


# -- the official implementations' outputs ---------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.parametrize("file", CLASSIFIERS)
def test_golden_logits(tmp_path, convert, file):
    reference, (name, wrap, *_) = golden(file), GOLDEN[file]
    torch.save(wrap(golden_state_dict(reference)), tmp_path / "official.pth")
    status, out, err = convert(
        tmp_path / "official.pth", tmp_path / "ours.safetensors", "--model", name, "--classifier"
    )
    assert status == 0, err
    assert " 0 resized" in out
    model = classifier_of(tmp_path / "ours.safetensors", name)
    with torch.inference_mode():
        assert_close_to_golden(model(golden_images(reference)), reference["logits"])


@pytest.mark.real_data
@pytest.mark.parametrize("file", BACKBONES)
def test_golden_maps(tmp_path, convert, file):
    reference, (name, wrap, arguments, options) = golden(file), GOLDEN[file]
    torch.save(wrap(golden_state_dict(reference)), tmp_path / "official.pth")
    status, out, err = convert(tmp_path / "official.pth", tmp_path / "ours.pth", "--model", name, *arguments)
    assert status == 0, err
    assert " 0 resized" in out
    assert ("MODEL.TRANSFORMER.GLOBAL_TOKENS [1, 1, 1, 1]" in out) == ("global_tokens" in options)
    check_maps(backbone_of(tmp_path / "ours.pth", name, **options), reference)


@pytest.mark.real_data
@pytest.mark.parametrize("file, suffix", [("vil_tiny_rpb_det", ".pth"), ("lit_s_det", ".safetensors")])
def test_golden_maps_by_the_command(tmp_path, file, suffix):
    reference, (name, wrap, *_) = golden(file), GOLDEN[file]
    source, output = tmp_path / "official.pth", tmp_path / f"ours{suffix}"
    torch.save(wrap(golden_state_dict(reference)), source)
    result = run_tool("convert_checkpoint.py", source, output, "--model", name)
    assert result.returncode == 0, result.stderr
    check_maps(backbone_of(output, name), reference)


def check_maps(model: torch.nn.Module, reference: dict) -> None:
    with torch.inference_mode():
        maps = model(golden_images(reference))
    assert maps.keys() == reference["stages"].keys()
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(maps[stage], expected)
