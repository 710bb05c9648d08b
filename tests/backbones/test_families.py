"""Tests that ViL, LIT and CvT share: feature maps of any image, gradients, precision, traces, training."""

import pytest
import torch
from torch import nn

from backbones.errors import ConfigError
from backbones.layers.token_merging import DeformableTokenMerging
from tests.backbones.families import VARIANTS, small_classifier, small_model
from tests.backbones.helpers import assert_all_close, map_gradients, random_images, trace
from tests.selection import slow_except

models = pytest.mark.parametrize("name", VARIANTS)
# One of each, with whose traces TorchScript's optimiser is tried.
OPTIMISED = ("vil_relative", "lit_relative", "cvt")
one_of_each_fast = pytest.mark.parametrize("name", slow_except(VARIANTS, OPTIMISED))
one_of_each = pytest.mark.parametrize("name", ["vil_absolute", "lit_relative", "cvt"])
SIZES = [(37, 50), (32, 32), (64, 64), (64, 33), (61, 130), (5, 130), (5, 9)]
TRACED_SIZES = [(1, 96, 64), (1, 37, 50), (2, 20, 90), (1, 8, 5), (2, 130, 70)]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@models
def test_maps_of_any_size(name):
    model, stages = small_model(name), VARIANTS[name].stages
    infos = {f"stage{i + 1}": (stage.dim, 4 * 2**i) for i, stage in enumerate(stages)}
    assert {stage: (info.channels, info.stride) for stage, info in model.feature_info.items()} == infos
    for height, width in SIZES:
        features = model(random_images(2, 3, height, width))
        expected = {n: (2, dim, -(-height // stride), -(-width // stride)) for n, (dim, stride) in infos.items()}
        assert {stage: tuple(feature.shape) for stage, feature in features.items()} == expected
        assert all(feature.isfinite().all() for feature in features.values())


@one_of_each
def test_features_are_those_that_are_asked_for(name):
    """Stages after the last one are not built."""
    whole, images = small_model(name), random_images(1, 3, 37, 50)
    expected = whole(images)
    for features, number in ((("stage1", "stage3"), 3), (("stage2",), 2)):
        part = small_model(name, out_features=features)
        assert len(part.stages) == number and tuple(part.feature_info) == features
        state_dict = {key: tensor for key, tensor in whole.state_dict().items() if key in part.state_dict()}
        part.load_state_dict(state_dict, strict=True)
        assert_all_close(part(images), {stage: expected[stage] for stage in features}, tolerance=0)
    assert small_model(name, out_features="stage2")(images).keys() == {"stage2"}


@models
def test_images_of_a_batch_do_not_mix(name):
    model, images = small_model(name), random_images(3, 3, 37, 50)
    together = model(images)
    for index in range(3):
        alone = model(images[index : index + 1])
        assert_all_close({n: m[index : index + 1] for n, m in together.items()}, alone, tolerance=1e-11)


@models
def test_an_image_ends_within_a_patch(name):
    """The model pads with zeros, below and on the right, as one would by hand up to whole patches."""
    model, images = small_model(name), random_images(2, 3, 37, 50)
    padded = torch.zeros(2, 3, 40, 52, dtype=torch.float64)
    padded[:, :, :37, :50] = images
    assert_all_close(model(images), model(padded), tolerance=1e-12)


@models
def test_both_attention_backends_give_the_same_features(name):
    fast, reference = small_model(name), small_model(name, attention_backend="reference")
    for size in ((37, 50), (64, 33)):
        images = random_images(2, 3, *size)
        assert_all_close(fast(images), reference(images), tolerance=1e-11)


@one_of_each
def test_forward_changes_only_batch_statistics(name):
    model = small_model(name).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    model(random_images(2, 3, 70, 90))
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if key.endswith(STATISTICS)}
    assert bool(changed) == (name != "vil_absolute")
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes


@one_of_each_fast
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)])
def test_lower_precision(name, dtype, tolerance):
    if name.startswith("lit"):
        tolerance = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 3e-1}[dtype]
    images = random_images(1, 3, 37, 50)
    expected = small_model(name)(images)
    for stage, feature in small_model(name).to(dtype)(images.to(dtype)).items():
        assert feature.dtype == dtype
        assert (feature.double() - expected[stage]).abs().max() <= tolerance * expected[stage].abs().max()


@one_of_each_fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(name, dtype):
    model, images = small_model(name).float(), random_images(2, 3, 37, 50, dtype=torch.float32)
    expected = model(images)
    with torch.autocast("cpu", dtype):
        for stage, feature in model(images).items():
            assert (feature - expected[stage]).abs().max() <= 0.3 * expected[stage].abs().max()
        features = model.train()(images)
    sum(feature.float().square().mean() for feature in features.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def without_gradient(gradients: dict) -> set[str]:
    """Less than rounding leaves. A softmax over the tokens takes no notice of the dynamic projection's bias."""
    idle = {name for name, gradient in gradients.items() if gradient is None or not gradient.abs().max() > 1e-11}
    return {name for name in idle if not name.endswith("dynamic_projection.bias")}


@models
def test_every_parameter_gets_a_gradient(name):
    model, images = small_model(name), random_images(2, 3, 70, 90)
    norms = [key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for training in (True, False) if norms else (True,):
        gradients = map_gradients(model.train(training), images)
        # Batch statistics take the bias before them away.
        idle = {f"{key.removesuffix('.norm')}.bias" for key in norms} if training else set()
        assert without_gradient(gradients) == idle & gradients.keys()
        assert all(gradient.isfinite().all() for gradient in gradients.values())


@models
def test_every_parameter_of_a_classifier_gets_a_gradient(name):
    model = small_classifier(name)
    logits = model(random_images(2, 3, 70, 90))
    assert logits.shape == (2, 5)
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    assert not without_gradient({key: parameter.grad for key, parameter in model.named_parameters()})


@one_of_each_fast
def test_a_trace_is_right_for_other_sizes(name):
    model = small_model(name)
    # Fusing a traced graph takes as long as all else, so only one model of each family is optimised.
    with torch.jit.optimized_execution(name in OPTIMISED):
        traced = trace(model, (random_images(1, 3, 96, 64),))
        for batch, height, width in TRACED_SIZES:
            images = random_images(batch, 3, height, width)
            assert_all_close(traced(images), model(images), tolerance=1e-10)


@models
@pytest.mark.parametrize("classifier", [True, False])
def test_only_weights_of_linear_layers_and_convolutions_decay(name, classifier):
    model = small_classifier(name) if classifier else small_model(name)
    types = (nn.Linear, nn.Conv2d, DeformableTokenMerging)
    decaying = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, types)}
    names = {key for key, _ in model.named_parameters()}
    assert decaying < names
    assert isinstance(model.no_weight_decay(), set) and model.no_weight_decay() == names - decaying


# With the beginning of a parameter's name, its layer.
LAYERS = {
    "vil_absolute": {
        "stages.0.patch_embed.": 0,
        "stages.0.positions.": 0,
        "stages.0.global_tokens": 0,
        "stages.0.blocks.0.": 1,
        "stages.1.patch_embed.": 2,
        "stages.1.positions.": 2,
        "stages.1.global_tokens": 2,
        "stages.1.blocks.0.": 2,
        "stages.1.blocks.1.": 3,
        "stages.2.": 4,
        "stages.3.": 5,
    },
    "lit_relative": {
        "stages.0.patch_embed.": 0,
        "stages.0.blocks.0.": 1,
        "stages.1.": 2,
        "output_norms.stage2.": 2,
        "stages.2.patch_embed.offset.": 3,
        "stages.2.blocks.0.": 3,
        "stages.2.blocks.1.": 4,
        "output_norms.stage3.": 4,
        "stages.3.": 5,
        "output_norms.stage4.": 5,
    },
    "cvt": {
        "stages.0.patch_embed.": 0,
        "stages.0.blocks.0.": 1,
        "stages.1.patch_embed.": 2,
        "stages.1.blocks.0.": 2,
        "stages.1.blocks.1.": 3,
        "stages.2.": 4,
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_count_blocks(name):
    model = small_model(name)
    names = [key for key, _ in model.named_parameters()]
    found = {start: {model.layer_id(key) for key in names if key.startswith(start)} for start in LAYERS[name]}
    assert found == {start: {layer} for start, layer in LAYERS[name].items()}
    assert model.num_layers == max(LAYERS[name].values())


def test_layers_of_stages_that_are_built():
    assert small_model("vil_separate", out_features=("stage2",)).num_layers == 3


@pytest.mark.parametrize("name", ["stages.0.patch_embed", "stages.9.blocks.0.mlp_norm.weight", "head.weight", ""])
def test_a_name_of_no_parameter_has_no_layer(name):
    with pytest.raises(ConfigError, match=f"CvT has no parameter '{name}'"):
        small_model("cvt").layer_id(name)


@one_of_each_fast
def test_activation_checkpointing_changes_no_gradient(name):
    images, results = random_images(4, 3, 37, 50), []
    for checkpointing in (False, True):
        model = small_model(name, drop_path_rate=0.5, activation_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        results.append(map_gradients(model, images))
    assert results[0].keys() == results[1].keys()
    assert any(gradient is not None for gradient in results[0].values())
    for key, gradient in results[0].items():
        other = results[1][key]
        # A block whose path all images drop has none.
        assert (gradient is None) == (other is None), key
        if gradient is not None:
            torch.testing.assert_close(other, gradient, atol=1e-11, rtol=1e-11)
