"""The official ViL, Transformer-LS and LIT: the same maps and logits from the same weights, through the converter."""

import pytest
import torch

from backbones import create_backbone, create_classifier
from backbones.attention.sliding_chunk import SHIFTS, SlidingChunkAttention
from backbones.convert import convert_state_dict
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.selection import slow_except

BACKBONES = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", {}),
    "vil_small_rpb_cls": ("vil_small_rpb", {}),
    "vil_small_ape_det": ("vil_small", {}),
    "vil_small_rpb_g1_det": ("vil_small_rpb", {"global_tokens": 1}),
    "vil_tiny_ape_cls": ("vil_tiny", {"max_img_size": 224}),
    "global_tiny_ape_cls": ("global_tiny", {"max_img_size": 224}),
    "srformer64_tiny_ape_cls": ("sra64_tiny", {"max_img_size": 224}),
    "performer_tiny_ape_cls": ("performer_tiny", {"max_img_size": 224}),
    "lit_ti_det": ("lit_ti", {}),
    "lit_s_det": ("lit_s", {}),
    "lit_s_seg": ("lit_s_seg", {}),
    "ls_medium_224_cls": ("ls_medium", {}),
}
CLASSIFIERS = {
    "vil_small_rpb_cls": ("vil_small_rpb", {}),
    "vil_tiny_ape_cls": ("vil_tiny", {"img_size": 224}),
    "global_tiny_ape_cls": ("global_tiny", {}),
    "linformer_tiny_ape_cls": ("linformer_tiny", {}),
    "srformer64_tiny_ape_cls": ("sra64_tiny", {}),
    "performer_tiny_ape_cls": ("performer_tiny", {}),
    "lit_ti_cls": ("lit_ti", {}),
    "lit_s_cls": ("lit_s", {}),
    "ls_medium_224_cls": ("ls_medium", {}),
}

# The other files cover the parts of ViL-Small, LS-Medium and LIT-S too.
LARGE = {"vil_small_ape_det", "vil_small_rpb_g1_det", "lit_s_cls", "vil_small_rpb_cls", "ls_medium_224_cls"}


@pytest.fixture(scope="module")
def file(request):
    """A file's name, its contents and its weights: made once for maps and logits."""
    reference = golden(request.param)
    return request.param, reference, golden_state_dict(reference)


@pytest.mark.parametrize("file", slow_except(BACKBONES, set(BACKBONES) - LARGE), indirect=True)
def test_maps(file):
    source, reference, official = file
    name, options = BACKBONES[source]
    converted, report = convert_state_dict(official, name, model_options=options)
    assert not report.resized
    check_parameters(reference, official, converted, report)
    model = create_backbone(name, **options).eval()
    model.load_state_dict(converted, strict=True)
    with torch.inference_mode():
        features = model(golden_images(reference))
    assert features.keys() == reference["stages"].keys()
    for stage, expected in reference["stages"].items():
        assert_close_to_golden(features[stage], expected)


@pytest.mark.parametrize("file", slow_except(CLASSIFIERS, set(CLASSIFIERS) - LARGE), indirect=True)
def test_logits(file):
    source, reference, official = file
    name, options = CLASSIFIERS[source]
    converted, report = convert_state_dict(official, name, classifier=True, model_options=options)
    assert not report.resized
    check_parameters(reference, official, converted, report)
    model = create_classifier(name, **options).eval()
    model.load_state_dict(converted, strict=True)
    with torch.inference_mode():
        assert_close_to_golden(model(golden_images(reference)), reference["logits"])


@pytest.fixture(scope="module")
def shifting():
    """Numbers of the official model, with full attention in its last two stages, our classifier and our backbone."""
    reference = golden("vil_tiny_rpb_shift_cls")
    options = {"attention": ("sliding_chunk", "sliding_chunk", "dense", "dense")}
    models = create_classifier("vil_tiny_rpb", **options), create_backbone("vil_tiny_rpb", **options)
    for model, is_classifier in zip(models, (True, False), strict=True):
        converted, report = convert_state_dict(
            golden_state_dict(reference), "vil_tiny_rpb", classifier=is_classifier, model_options=options
        )
        assert not report.resized
        model.load_state_dict(converted, strict=True)
    return reference, *models


@pytest.mark.parametrize("step", [f"{row},{col}" for row, col in SHIFTS])
def test_random_shift(shifting, step):
    reference, classifier, backbone = shifting
    for module in (*classifier.train().modules(), *backbone.train().modules()):
        if isinstance(module, SlidingChunkAttention):
            module.shift = tuple(map(int, step.split(",")))
    expected = reference["shifts"][step]
    with torch.no_grad():
        assert_close_to_golden(classifier(golden_images(reference)), expected["logits"])
        features = backbone(golden_images(reference))
    assert set(expected["stages"]) == {"stage1", "stage2"}
    for stage, values in expected["stages"].items():
        assert_close_to_golden(features[stage], values)


def check_parameters(reference: dict, official: dict, converted: dict, report) -> None:
    """The official parameter count is ours plus the dropped tensors, without indices and shared tensors.

    A stage's last block uses one half of the bias between global and local tokens.
    """
    not_counted = {*reference["integer_buffers_not_filled"], *reference["aliases"], *report.mapped}
    buffers = ("attention.features", "running_mean", "running_var", "num_batches_tracked")
    ours = sum(tensor.numel() for name, tensor in converted.items() if not name.endswith(buffers))
    dropped = sum(official[name].numel() for name in report.dropped if name in official and name not in not_counted)
    halves = sum(official[name].numel() // 2 for name in report.mapped if "g2l_relative" in name)
    # LIT-Ti's detector has the position of a global token that it lacks.
    positions = sum(official[name][:, 0].numel() for name in report.mapped if f"{name}[:, 0]" in report.dropped)
    assert reference["parameters"] == ours + dropped + halves + positions


@pytest.mark.parametrize(
    "source, name",
    [
        ("vil_small_rpb_cls", "vil_small_rpb"),
        ("vil_tiny_ape_cls", "vil_tiny"),
        ("lit_ti_cls", "lit_ti"),
        ("lit_s_cls", "lit_s"),
        ("ls_medium_224_cls", "ls_medium"),
    ],
)
def test_classifier_has_all_that_the_official_one_uses(source, name):
    """No parameter is missing but biases of global queries that have no effect: two of a head and block."""
    reference = golden(source)
    with torch.device("meta"):
        ours = sum(parameter.numel() for parameter in create_classifier(name).parameters())
    # Stages 1 to 3 of vil_small_rpb have 3, 3 and 6 heads, and one global token; in LS only stage 3 has such biases.
    unused = {"vil_small_rpb": 2 * (3 + 3 + 6), "ls_medium": 2 * 6}
    assert reference["parameters"] == ours + unused.get(name, 0)
