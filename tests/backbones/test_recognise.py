"""The project of an official checkpoint is recognised by names, in any of the wrappers."""

import pytest
import torch

from backbones import ConfigError, create_backbone
from backbones.convert import recognise
from tests import wrapping
from tests.backbones import official, official_lit

HEADS = {"backbone.fpn_lateral3.weight": torch.ones(2), "head.cls_score.bias": torch.ones(3)}


def vil() -> dict[str, torch.Tensor]:
    return official.official_state_dict(relative_bias=True)


def lit(name: str = "s", *, classifier: bool = True) -> dict[str, torch.Tensor]:
    return official_lit.official_state_dict({"ti": official_lit.TI, "s": official_lit.S}[name], classifier=classifier)


def long_short() -> dict[str, torch.Tensor]:
    return vil() | {"layer1.1.attn.to_dynamic_projection.weight": torch.ones(8, 48)}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "project, weights, wrap",
    [
        ("vision-longformer", vil, wrapping.vision_longformer),
        ("transformer-ls", long_short, wrapping.vision_longformer),
        ("LIT", lambda: lit("ti"), wrapping.lit_classifier),
        ("LIT", lit, wrapping.lit_classifier),
    ],
)
def test_classifiers(project, weights, wrap, wrapped):
    found = recognise(wrap(weights()) if wrapped else weights())
    assert (found.project, found.classifier, found.detector) == (project, True, {})
    assert_equal(found.backbone, weights())


@pytest.mark.parametrize("heads", [HEADS, {}])
def test_vil_detectors(heads):
    found = recognise(wrapping.detectron2_detector(vil(), heads))
    assert (found.project, found.classifier) == ("VisionLongformerForObjectDetection", False)
    assert_equal(found.backbone, vil())
    assert_equal(found.detector, heads)


@pytest.mark.parametrize("segmentor", [False, True])
@pytest.mark.parametrize("name", ["ti", "s"])
def test_lit_detectors_and_segmentors(name, segmentor):
    weights, heads = lit(name, classifier=False), wrapping.mmdetection_heads(segmentor)
    found = recognise(wrapping.mmdetection(weights, heads))
    assert (found.project, found.classifier) == ("LIT mmsegmentation" if segmentor else "LIT mmdetection", False)
    assert_equal(found.backbone, weights)
    assert_equal(found.detector, heads)


def test_unusual_contents():
    contents = wrapping.vision_longformer(vil())
    contents["net"]["module.calls"] = 3
    assert_equal(recognise(contents).backbone, vil())
    weights = {name: tensor for name, tensor in vil().items() if not name.startswith(("head.", "norm."))}
    assert not recognise({"model": weights}).classifier
    with pytest.raises(ConfigError, match="layer1.0.proj.weight"):
        recognise(weights | {"module.layer1.0.proj.weight": torch.ones(1)})


def ours() -> dict[str, torch.Tensor]:
    return create_backbone("vil_tiny_1_1_3_1").state_dict()


@pytest.mark.parametrize(
    "state_dict",
    [
        ours,
        lambda: {f"backbone.{name}": tensor for name, tensor in ours().items()},
        lambda: {f"backbone.bottom_up.net.{name}": tensor for name, tensor in ours().items()} | HEADS,
        lambda: {"layer1.0.conv1.weight": torch.ones(1), "layer1.0.bn1.bias": torch.ones(1), "fc.bias": torch.ones(1)},
        lambda: {"backbone.bottom_up.res2.0.conv1.weight": torch.ones(1)},
        lambda: {"blocks.0.attn.qkv.weight": torch.ones(1), "patch_embed.proj.weight": torch.ones(1)},
    ],
    ids=["backbone", "classifier", "detector", "torchvision ResNet", "detectron2 ResNet", "timm ViT"],
)
def test_other_checkpoints(state_dict):
    assert recognise({"model": state_dict()}) is None
    assert recognise(state_dict()) is None


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
