"""ViL, Transformer-LS, LIT and LITv2 give the feature maps and logits of the official code with converted weights."""

import pytest
import torch

from backbones import create_backbone, create_classifier
from backbones.attention.sliding_chunk import SHIFTS, SlidingChunkAttention
from backbones.convert import convert_state_dict
from tests.golden import assert_close_to_golden, golden, golden_images, golden_state_dict
from tests.selection import slow_except

# File -> variant, options of the backbone and of the classifier; None if the file has no outputs of it
AT_224 = {"max_img_size": 224}
FILES = {
    "vil_tiny_rpb_det": ("vil_tiny_rpb", {}, None),
    "vil_small_rpb_cls": ("vil_small_rpb", {}, {}),
    "vil_small_ape_det": ("vil_small", {}, None),
    "vil_small_rpb_g1_det": ("vil_small_rpb", {"global_tokens": 1}, None),
    "vil_tiny_ape_cls": ("vil_tiny", AT_224, {"img_size": 224}),
    "global_tiny_ape_cls": ("global_tiny", AT_224, {}),
    "linformer_tiny_ape_cls": ("linformer_tiny", None, {}),
    "srformer64_tiny_ape_cls": ("sra64_tiny", AT_224, {}),
    "performer_tiny_ape_cls": ("performer_tiny", AT_224, {}),
    "lit_ti_det": ("lit_ti", {}, None),
    "lit_s_det": ("lit_s", {}, None),
    "lit_s_seg": ("lit_s_seg", {}, None),
    "lit_ti_cls": ("lit_ti", None, {}),
    "lit_s_cls": ("lit_s", None, {}),
    "litv2_s_det": ("litv2_s", {}, None),
    "litv2_s_ws4_det": ("litv2_s_ws4", {}, None),
    "litv2_s_cls": ("litv2_s", None, {}),
    "ls_medium_224_cls": ("ls_medium", {}, {}),
}
# Large models of Transformer-LS take seconds.
FAST = ["vil_tiny_rpb_det", "lit_ti_cls"]


def converted(reference: dict, name: str, options: dict, *, classifier: bool = False) -> torch.nn.Module:
    """Return the model with the official weights. No table is resized."""
    official = golden_state_dict(reference)
    state_dict, report = convert_state_dict(official, name, classifier=classifier, model_options=options)
    assert not report.resized
    model = (create_classifier if classifier else create_backbone)(name, **options).double().eval()
    model.load_state_dict(state_dict, strict=True)
    return model


@pytest.mark.parametrize("source", slow_except(FILES, FAST))
def test_maps_and_logits(source):
    reference, (name, options, classifier_options) = golden(source), FILES[source]
    images = golden_images(reference)
    with torch.inference_mode():
        if options is not None:
            features = converted(reference, name, options)(images)
            assert features.keys() == reference["stages"].keys()
            for stage, expected in reference["stages"].items():
                assert_close_to_golden(features[stage], expected)
        if classifier_options is not None:
            logits = converted(reference, name, classifier_options, classifier=True)(images)
            assert_close_to_golden(logits, reference["logits"])


@pytest.mark.slow
def test_random_shift():
    """The official model has full attention in its last two stages."""
    reference = golden("vil_tiny_rpb_shift_cls")
    options = {"attention": ("sliding_chunk", "sliding_chunk", "dense", "dense")}
    classifier = converted(reference, "vil_tiny_rpb", options, classifier=True).train()
    backbone = converted(reference, "vil_tiny_rpb", options).train()
    assert {f"{row},{col}" for row, col in SHIFTS} == reference["shifts"].keys()
    for row, col in SHIFTS:
        for module in (*classifier.modules(), *backbone.modules()):
            if isinstance(module, SlidingChunkAttention):
                module.shift = row, col
        expected = reference["shifts"][f"{row},{col}"]
        with torch.no_grad():
            assert_close_to_golden(classifier(golden_images(reference)), expected["logits"])
            features = backbone(golden_images(reference))
        assert set(expected["stages"]) == {"stage1", "stage2"}
        for stage, values in expected["stages"].items():
            assert_close_to_golden(features[stage], values)
