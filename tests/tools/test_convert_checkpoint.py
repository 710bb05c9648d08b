"""Official checkpoints through the tool: the outputs of the official models, or one line and no file."""

import json
import pickle
import runpy
import sys

import pytest
import torch
from safetensors.torch import save_file

from backbones import create_backbone, create_classifier
from backbones.utils.files import read_checkpoint
from backbones.variants import VARIANTS
from projects_vil.checkpoint import PROVENANCE_KEY, Provenance
from projects_vil.checkpoint.origins.conversion import BACKBONE_PREFIX
from tests import wrapping
from tests.backbones import official, official_lit
from tests.backbones.helpers import random_images
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.projects_vil.helpers import ROOT, error_line, run_tool
from tests.selection import slow_except

AT_224 = ("--img-size", "224", "224")
# Golden file -> variant, how the official repository wraps it, arguments of the tool, options of the model
GOLDEN = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", wrapping.detectron2_detector, (), {}),
    "vil_small_ape_det": ("vil_small", wrapping.detectron2_detector, (), {}),
    "vil_small_rpb_g1_det": ("vil_small_rpb", wrapping.detectron2_detector, (), {"global_tokens": [1, 1, 1, 1]}),
    "lit_ti_det": ("lit_ti", wrapping.mmdetection, (), {}),
    "lit_s_det": ("lit_s", wrapping.mmdetection, (), {}),
    "lit_s_seg": ("lit_s_seg", wrapping.mmsegmentation, (), {}),
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


@pytest.mark.parametrize("file", slow_except(CLASSIFIERS, ["vil_tiny_ape_cls"]))
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


@pytest.mark.parametrize("file", slow_except(BACKBONES, ["vil_tiny_rpb_det"]))
def test_golden_maps(tmp_path, convert, file):
    reference, (name, wrap, arguments, options) = golden(file), GOLDEN[file]
    torch.save(wrap(golden_state_dict(reference)), tmp_path / "official.pth")
    status, out, err = convert(tmp_path / "official.pth", tmp_path / "ours.pth", "--model", name, *arguments)
    assert status == 0, err
    assert " 0 resized" in out
    assert ("MODEL.TRANSFORMER.GLOBAL_TOKENS '[1, 1, 1, 1]'" in out) == ("global_tokens" in options)
    check_maps(backbone_of(tmp_path / "ours.pth", name, **options), reference)


@pytest.mark.slow
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


# -- generated checkpoints -------------------------------------------------------------------------


def vil_classifier() -> dict[str, torch.Tensor]:
    """In float32, as released ones are."""
    weights = official.official_state_dict(relative_bias=True)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


@pytest.fixture
def source(tmp_path):
    torch.save(wrapping.vision_longformer(vil_classifier()), tmp_path / "official.pth")
    return tmp_path / "official.pth"


@pytest.mark.parametrize("wrap", [wrapping.vision_longformer, dict, lambda weights: {"model": weights}])
def test_a_classifier_computes_what_the_official_one_does(tmp_path, convert, wrap):
    torch.save(wrap(vil_classifier()), tmp_path / "official.pth")
    images, outputs = random_images(2, 3, 50, 43).float(), []
    _, expected = official.official_forward(vil_classifier(), images)
    for suffix in (".pth", ".safetensors"):
        output = tmp_path / f"ours{suffix}"
        status, _, err = convert(tmp_path / "official.pth", output, "--model", VARIANT, "--classifier")
        assert status == 0, err
        with torch.inference_mode():
            outputs.append(classifier_of(output, VARIANT, num_classes=10)(images))
    torch.testing.assert_close(outputs[0], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_safetensors_file_of_an_official_model_is_read(tmp_path, convert, suffix):
    save_file(vil_classifier(), tmp_path / "official.safetensors")
    status, _, err = convert(tmp_path / "official.safetensors", tmp_path / f"ours{suffix}", "--model", VARIANT)
    assert status == 0, err
    backbone_of(tmp_path / f"ours{suffix}", VARIANT)


@pytest.mark.parametrize("family", ["TI", "S"])
def test_lit(tmp_path, convert, monkeypatch, family):
    variant = getattr(official_lit, family)
    monkeypatch.setitem(VARIANTS, "lit_small", variant)
    images = random_images(2, 3, 64, 64).float()
    weights = official_lit.official_state_dict(variant, classifier=True)
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    torch.save(wrapping.lit_classifier(weights), tmp_path / "official.pth")
    arguments = ("--model", "lit_small", "--classifier", "--img-size", "64", "64")
    status, _, err = convert(tmp_path / "official.pth", tmp_path / "ours.safetensors", *arguments)
    assert status == 0, err
    model = classifier_of(tmp_path / "ours.safetensors", "lit_small", num_classes=10, img_size=64)
    with torch.inference_mode():
        expected = official_lit.official_forward(weights, images, variant)[1]
        torch.testing.assert_close(model(images), expected, atol=1e-4, rtol=1e-4)


def test_the_report(tmp_path, convert, source):
    status, out, err = convert(source, tmp_path / "a.pth", "--model", VARIANT, "--json", tmp_path / "report.json")
    assert status == 0, err
    report, weights = json.loads((tmp_path / "report.json").read_text()), vil_classifier()
    assert out.splitlines()[0] == f"vision-longformer: {report['summary']}"
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'a.pth'}"
    assert weights.keys() <= {name for part in ("mapped", "split", "tied", "dropped") for name in report[part]}
    assert {"resized", "initialised"} <= report.keys() and report["source"] == "vision-longformer"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_file_says_what_it_is(tmp_path, convert, source, suffix):
    assert convert(source, tmp_path / f"a{suffix}", "--model", VARIANT)[0] == 0
    contents = read_checkpoint(tmp_path / f"a{suffix}")
    assert Provenance.of(contents).variant == VARIANT
    assert Provenance.of(contents).input_format.channels == "RGB"
    said = contents[PROVENANCE_KEY]
    assert said["source"] == "vision-longformer" and "vil-detectron2" in said["versions"]


# -- mistakes: one line, a status that is not 0, and no file ---------------------------------------


class Malicious:
    """Writes a file where it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def mistake(tmp_path, convert):
    def run(*args) -> str:
        before = sorted(tmp_path.rglob("*"))
        status, out, err = convert(*args)
        assert status == 1 and out == ""
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("error: ").rstrip("\n")

    return run


def damaged(change) -> dict:
    weights = vil_classifier()
    change(weights)
    return wrapping.vision_longformer(weights)


def renamed(weights: dict) -> None:
    weights["layer3.2.mlp.fc1.bais"] = weights.pop("layer3.2.mlp.fc1.bias")


def halved(weights: dict) -> None:
    for name in list(weights)[1::2]:
        del weights[name]


@pytest.mark.parametrize(
    "change, hints",
    [
        (
            renamed,
            [
                "layer3.2.mlp.fc1.bais would be stages.2.blocks.0.mlp.expand.bais",
                "nothing fills stages.2.blocks.0.mlp.expand.bias",
            ],
        ),
        (lambda w: w.update({"layer9.0.extra": torch.ones(1)}), ["no rule explains layer9.0.extra"]),
        (halved, ["nothing fills", "and "]),
        (lambda w: w.update({"layer1.0.proj.bias": torch.ones(3)}), ["layer1.0.proj.bias has shape (3,)"]),
        (lambda w: w.update({"layer1.0.cls_token": torch.ones(3)}), ["layer1.0.cls_token has shape (3,)"]),
    ],
    ids=["renamed", "extra", "half", "shape", "axes"],
)
def test_names_that_do_not_fit(tmp_path, mistake, change, hints):
    torch.save(damaged(change), tmp_path / "official.pth")
    message = mistake(tmp_path / "official.pth", tmp_path / "a.pth", "--model", VARIANT)
    assert str(tmp_path / "official.pth") in message and all(hint in message for hint in hints), message


@pytest.mark.parametrize("arguments", [(), ("--classifier",)])
@pytest.mark.parametrize(
    "variant",
    slow_except(
        ["vil_small_1_1_9_1_rpb", "vil_tiny_rpb", "vil_tiny_1_10_1_rpb", "vil_tiny", "lit_s", "lit_ti", "ls_tiny"],
        ["vil_tiny_rpb", "lit_ti"],
    ),
)
def test_another_variant(tmp_path, mistake, source, variant, arguments):
    message = mistake(source, tmp_path / "a.pth", "--model", variant, *arguments)
    assert "vision-longformer" in message and ("does not fit" in message or "another variant" in message), message


def test_a_variant_without_official_weights(tmp_path, mistake, source):
    assert "nothing to convert" in mistake(source, tmp_path / "a.pth", "--model", "cvt_ls_13")


def test_an_unknown_variant(tmp_path, mistake, source):
    assert "did you mean 'vil_tiny'" in mistake(source, tmp_path / "a.pth", "--model", "vil_tinny")


def test_a_detector_is_no_classifier(tmp_path, mistake):
    torch.save(wrapping.detectron2_detector(vil_classifier()), tmp_path / "official.pth")
    assert "no classification head" in mistake(
        tmp_path / "official.pth", tmp_path / "a.pth", "--model", VARIANT, "--classifier"
    )


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"a text file\n", b"\x80\x04garbage"])
def test_files_of_another_kind(tmp_path, mistake, suffix, content):
    path = tmp_path / f"official{suffix}"
    path.write_bytes(content)
    assert str(path) in mistake(path, tmp_path / "a.pth", "--model", VARIANT)


def test_a_truncated_file_a_folder_and_none(tmp_path, mistake, source):
    source.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    (tmp_path / "folder.pth").mkdir()
    for path in (source, tmp_path / "folder.pth", tmp_path / "absent.pth"):
        assert str(path) in mistake(path, tmp_path / "a.pth", "--model", VARIANT)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_pickle(tmp_path, mistake, how):
    path, contents = tmp_path / "official.pth", damaged(lambda weights: None)
    contents["x"] = Malicious(tmp_path / "executed")
    if how == "torch":
        torch.save(contents, path)
    else:
        path.write_bytes(pickle.dumps(contents))
    assert str(path) in mistake(path, tmp_path / "a.pth", "--model", VARIANT)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_this_project(tmp_path, mistake, convert, source):
    assert convert(source, tmp_path / "a.pth", "--model", VARIANT)[0] == 0
    assert "none of the official formats" in mistake(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT)


@pytest.mark.parametrize("output", ["a.txt", "a", "absent/a.pth", "folder.pth", "official.pth"])
def test_an_output_that_cannot_be_written(tmp_path, mistake, source, output):
    (tmp_path / "folder.pth").mkdir()
    before = source.read_bytes()
    assert output in mistake(source, tmp_path / output, "--model", VARIANT)
    assert source.read_bytes() == before


def test_a_report_that_cannot_be_written(tmp_path, mistake, source):
    for report in (tmp_path / "absent" / "report.json", tmp_path):
        message = mistake(source, tmp_path / "a.pth", "--model", VARIANT, "--json", report)
        assert str(report) in message


def test_sizes_that_are_none(tmp_path, mistake, source):
    assert "--img-size 0 224" in mistake(source, tmp_path / "a.pth", "--model", VARIANT, "--img-size", "0", "224")


@pytest.mark.slow
def test_one_line_from_the_command(tmp_path):
    (tmp_path / "official.pth").write_text("a text file")
    result = run_tool("convert_checkpoint.py", tmp_path / "official.pth", tmp_path / "a.pth", "--model", VARIANT)
    assert "official.pth is no checkpoint" in error_line(result) and not (tmp_path / "a.pth").exists()


@pytest.mark.parametrize("which", ["source", "output"])
def test_a_report_does_not_replace_a_checkpoint(convert, tmp_path, which):
    files = {"source": tmp_path / "a.pth", "output": tmp_path / "b.pth"}
    torch.save(wrapping.vision_longformer(official.official_state_dict(relative_bias=True)), files["source"])
    before = files["source"].read_bytes()
    status, _, errors = convert(files["source"], files["output"], "--model", VARIANT, "--json", files[which])
    assert status == 1 and "the file is needed for something else" in errors
    assert files["source"].read_bytes() == before and not files["output"].exists()


def set_to(name, tensor):
    return lambda weights: weights.update({name: tensor})


BIAS, PROJ = "layer1.1.attn.g2l_relative_position_bias", "layer1.0.proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (set_to(BIAS, torch.zeros(1)), "has shape (1,): 3 axes are expected"),
        (set_to(PROJ, torch.zeros(48, 3, 4, 4, dtype=torch.int64)), f"{PROJ} is no weight: its type is torch.int64"),
        (set_to(PROJ, torch.full((48, 3, 4, 4), float("nan"))), "has values that are not finite"),
        (set_to("layer1.1.attn.local_relative_position_bias_table", torch.zeros(0, 1)), "has shape (0, 1)"),
        (set_to("head.bogus", torch.zeros(3)), "head.bogus"),
        (set_to(PROJ, torch.zeros(48, 3, 4, 4).to_sparse()), "is no plain tensor of values"),
        (set_to(7, torch.zeros(3)), "7 among its names"),
    ],
    ids=["rank", "type", "nan", "empty table", "extra head", "sparse", "name"],
)
def test_tensors_that_are_no_weights(convert, tmp_path, change, message):
    weights = official.official_state_dict(relative_bias=True)
    change(weights)
    torch.save({"net": weights}, tmp_path / "a.pth")
    status, _, errors = convert(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT)
    assert status == 1 and message in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "b.pth").exists()


def test_the_window_of_a_classifier_comes_from_its_table(convert, tmp_path):
    weights = official.official_state_dict(relative_bias=True)
    for name in [name for name in weights if name.startswith("layer2") and "local_relative" in name]:
        weights[name] = torch.randn(47**2, weights[name].shape[1])  # windows of 12
    torch.save(wrapping.vision_longformer(weights), tmp_path / "a.pth")
    status, _, errors = convert(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT, "--classifier")
    assert status == 0, errors
    assert read_checkpoint(tmp_path / "b.pth")[PROVENANCE_KEY]["options"]["window_size"] == [7, 12, 7, 7]


@pytest.mark.parametrize(
    "content, message",
    [(b"", "is empty"), (b"hello world\n", "damaged, cut off, or no file"), (b"PK\x03\x04 and no more", "damaged")],
)
def test_what_is_no_checkpoint_says_so(convert, tmp_path, content, message):
    (tmp_path / "a.pth").write_bytes(content)
    status, _, errors = convert(tmp_path / "a.pth", tmp_path / "b.pth", "--model", VARIANT)
    assert status == 1 and message in errors and len(errors.splitlines()) == 1
