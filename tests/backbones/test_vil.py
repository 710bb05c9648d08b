"""The ViL model: the maps it gives for any image, what trains, and what its options change."""

import io
import warnings

import pytest
import torch
from torch import nn

from backbones.backbone import Classifier, Settings
from backbones.errors import InputError
from backbones.layers.block import Block
from backbones.vil import ViL
from tests.backbones.helpers import (
    FAMILIES,
    assert_all_close,
    map_gradients,
    random_images,
    randomise,
    small_variant,
    small_vil,
    trace,
)

families = pytest.mark.parametrize("family", FAMILIES)
CHANNELS = {"stage1": 4, "stage2": 8, "stage3": 8, "stage4": 16}
STRIDES = {"stage1": 4, "stage2": 8, "stage3": 16, "stage4": 32}


@families
@pytest.mark.parametrize("height, width", [(37, 50), (32, 32), (64, 33), (5, 130)])
def test_maps_of_any_size(family, height, width):
    maps = small_vil(family)(random_images(2, 3, height, width))
    expected = {name: (2, CHANNELS[name], -(-height // STRIDES[name]), -(-width // STRIDES[name])) for name in STRIDES}
    assert {name: tuple(map_.shape) for name, map_ in maps.items()} == expected
    assert all(map_.isfinite().all() for map_ in maps.values())


def test_feature_info_says_what_the_maps_are():
    model = small_vil(out_features=("stage2", "stage4"))
    assert {name: (info.channels, info.stride) for name, info in model.feature_info.items()} == {
        "stage2": (8, 8),
        "stage4": (16, 32),
    }
    assert model(random_images(1, 3, 32, 64)).keys() == model.feature_info.keys()


def test_stages_after_the_last_feature_are_not_built():
    whole, part = small_vil(), small_vil(out_features=("stage1", "stage2"))
    assert len(part.stages) == 2
    part.load_state_dict({name: t for name, t in whole.state_dict().items() if name[:8] in ("stages.0", "stages.1")})
    images = random_images(1, 3, 37, 50)
    expected = whole(images)
    assert_all_close(part(images), {name: expected[name] for name in ("stage1", "stage2")}, tolerance=0)


@families
def test_images_of_a_batch_do_not_mix(family):
    model, images = small_vil(family), random_images(3, 3, 37, 50)
    together = model(images)
    for index in range(3):
        alone = model(images[index : index + 1])
        assert_all_close({n: m[index : index + 1] for n, m in together.items()}, alone, tolerance=1e-11)


@families
def test_an_image_ends_within_a_patch(family):
    """The model pads with zeros, below and on the right, as one would by hand up to whole patches."""
    model, images = small_vil(family), random_images(2, 3, 37, 50)
    padded = torch.zeros(2, 3, 40, 52, dtype=torch.float64)
    padded[:, :, :37, :50] = images
    assert_all_close(model(images), model(padded), tolerance=1e-12)


def test_what_lies_beside_an_image_is_not_read():
    model = small_vil()
    frame = torch.full((2, 3, 60, 70), float("nan"), dtype=torch.float64)
    frame[:, :, 10:47, 10:60] = random_images(2, 3, 37, 50)
    frame.requires_grad_()
    maps = model(frame[:, :, 10:47, 10:60])
    assert_all_close(maps, model(random_images(2, 3, 37, 50)), tolerance=1e-12)
    sum(map_.square().sum() for map_ in maps.values()).backward()
    inside = frame.grad[:, :, 10:47, 10:60].clone()
    assert inside.isfinite().all() and inside.ne(0).any()
    frame.grad[:, :, 10:47, 10:60] = 0
    assert frame.grad.eq(0).all()


@families
def test_both_attention_backends_give_the_same_maps(family):
    images = random_images(2, 3, 37, 50)
    expected = small_vil(family, attention_backend="reference")(images)
    assert_all_close(small_vil(family)(images), expected, tolerance=1e-11)


def test_forward_changes_nothing():
    model = small_vil("absolute").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    model(random_images(1, 3, 37, 50))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_an_image_beyond_the_tables_raises():
    model = small_vil("absolute", max_img_size=(64, 96))
    model(random_images(1, 3, 64, 96))
    for size in ((65, 96), (64, 97)):
        with pytest.raises(InputError, match="max_img_size"):
            model(random_images(1, 3, *size))


@pytest.mark.parametrize("side, places", [(160, (40, 20, 10, 5)), (161, (48, 24, 12, 6)), (1333, (336, 168, 84, 42))])
def test_tables_hold_whole_places_of_the_last_stage(side, places):
    with torch.device("meta"):
        model = ViL(small_variant(), Settings(max_img_size=(side, 32)))
    assert tuple(len(stage.positions.rows) for stage in model.stages) == places
    assert tuple(len(stage.positions.cols) for stage in model.stages) == (8, 4, 2, 1)


@pytest.mark.parametrize(
    "family",
    ["relative", "absolute", "cyclic", "exact", "dense_relative", "global", "spatial_reduction", "performer"],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 3e-2), (torch.bfloat16, 2e-1)])
def test_lower_precision(family, dtype, tolerance):
    images = random_images(1, 3, 37, 50)
    expected = small_vil(family)(images)
    for name, map_ in small_vil(family).to(dtype)(images.to(dtype)).items():
        assert map_.dtype == dtype
        assert (map_.double() - expected[name]).abs().max() <= tolerance * expected[name].abs().max()


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(family, dtype):
    model, images = small_vil(family).float().train(), random_images(2, 3, 37, 50, dtype=torch.float32)
    expected = model(images)
    with torch.autocast("cpu", dtype):
        maps = model(images)
    for name, map_ in maps.items():
        assert (map_ - expected[name]).abs().max() <= 0.2 * expected[name].abs().max()
    sum(map_.float().square().mean() for map_ in maps.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@families
def test_every_parameter_gets_a_gradient(family):
    gradients = map_gradients(small_vil(family).train(), random_images(2, 3, 70, 90))
    assert not [name for name, gradient in gradients.items() if gradient is None or not gradient.abs().sum() > 0]
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@families
def test_every_parameter_of_a_classifier_gets_a_gradient(family):
    settings = Settings(out_features=("stage4",), keep_global_tokens=True)
    backbone = ViL(small_variant(**FAMILIES[family]), settings)
    model = randomise(Classifier(backbone, num_classes=5, pool="mean", norm_eps=1e-6)).double().train()
    logits = model(random_images(2, 3, 70, 90))
    assert logits.shape == (2, 5)
    (logits * torch.arange(10).view(2, 5)).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


@pytest.mark.parametrize("family", ["relative", "separate", "absolute"])
def test_training_after_inference_mode(family):
    model, images = small_vil(family), random_images(1, 3, 37, 50)
    with torch.inference_mode():
        expected = {name: map_.clone() for name, map_ in model(images).items()}
    model.train()
    gradients = map_gradients(model, images)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert_all_close({n: m.detach() for n, m in model(images).items()}, expected, tolerance=1e-12)


TRACED_SIZES = [(1, 96, 64), (1, 37, 50), (2, 20, 90), (1, 8, 5), (2, 130, 70)]


@families
def test_a_trace_is_right_for_other_sizes(family):
    model = small_vil(family)
    traced = trace(model, (random_images(1, 3, 96, 64),))
    for batch, height, width in TRACED_SIZES:
        images = random_images(batch, 3, height, width)
        assert_all_close(traced(images), model(images), tolerance=1e-11)


@pytest.mark.parametrize("family", ["relative", "absolute"])
def test_a_trace_is_saved_and_loaded(family):
    model, images = small_vil(family), random_images(2, 3, 37, 50)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of TorchScript
        torch.jit.save(trace(model, (random_images(1, 3, 96, 64),)), file)
        file.seek(0)
        loaded = torch.jit.load(file)
    assert_all_close(loaded(images), model(images), tolerance=1e-11)


@families
def test_a_state_dict_is_the_parameters_and_loads_strictly(family):
    model = small_vil(family)
    other = ViL(small_variant(**FAMILIES[family]), Settings(max_img_size=(160, 160))).double().eval()
    state_dict = model.state_dict()
    features = {name for name in state_dict if name.endswith("attention.features")}
    assert set(state_dict) - features == {name for name, _ in model.named_parameters()}
    assert bool(features) == (family in ("performer", "partial"))
    other.load_state_dict(state_dict, strict=True)
    images = random_images(1, 3, 37, 50)
    assert_all_close(other(images), model(images), tolerance=0)


@families
@pytest.mark.parametrize("classifier", [True, False])
def test_only_weights_of_linear_layers_and_convolutions_decay(family, classifier):
    with torch.device("meta"):
        model = ViL(small_variant(**FAMILIES[family]), Settings(keep_global_tokens=classifier))
        if classifier:
            model = Classifier(model, num_classes=5, pool="mean", norm_eps=1e-6)
    decaying = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    names = {name for name, _ in model.named_parameters()}
    assert decaying < names
    assert model.no_weight_decay() == names - decaying
    assert isinstance(model.no_weight_decay(), set)


def test_what_does_not_decay_by_name():
    names = small_vil("separate").no_weight_decay() | small_vil("many_globals").no_weight_decay()
    block = "stages.1.blocks.0"
    assert names >= {
        "stages.0.global_tokens",
        "stages.0.positions.rows",
        "stages.0.positions.cols",
        "stages.0.positions.global_tokens",
        "stages.0.patch_embed.norm.weight",
        "stages.0.patch_embed.projection.bias",
        f"{block}.attention_norm.weight",
        f"{block}.attention.relative_bias.table",
        f"{block}.attention.local_to_global",
        f"{block}.attention.global_to_local",
        f"{block}.attention.global_to_global",
        f"{block}.attention.global_query.bias",
        f"{block}.mlp.expand.bias",
    }


@pytest.mark.parametrize("number", [0, 1, 3])
def test_frozen_stages_get_no_gradient(number):
    model = small_vil("absolute", drop_path_rate=0.5).train()
    model.freeze_stages(number)
    torch.manual_seed(0)
    gradients = map_gradients(model, random_images(8, 3, 37, 50))
    for name, gradient in gradients.items():
        assert (gradient is None) == (int(name.split(".")[1]) < number), name
    for index, stage in enumerate(model.stages):
        for block in stage.blocks:
            assert (block.drop_path_rate == 0) == (index < number or block is model.stages[0].blocks[0])


def test_stochastic_depth_grows_linearly_over_all_blocks():
    rates = [0.0, 0.1, 0.2, 0.3, 0.4]  # five blocks
    for out_features in (None, ("stage2",)):
        model = ViL(small_variant(), Settings(drop_path_rate=0.4, out_features=out_features))
        blocks = [block for stage in model.stages for block in stage.blocks]
        assert [block.drop_path_rate for block in blocks] == pytest.approx(rates[: len(blocks)])
        assert len(blocks) == (5 if out_features is None else 3)


def test_stochastic_depth_rests_in_eval_mode():
    model, images = small_vil(drop_path_rate=0.9), random_images(2, 3, 37, 50)
    expected = small_vil(drop_path_rate=0.0)(images)
    assert_all_close(model(images), expected, tolerance=0)
    assert any(not torch.equal(map_, expected[name]) for name, map_ in model.train()(images).items())


def test_stochastic_depth_drops_paths_of_whole_images():
    """Each image has one of four outcomes, the same for its local and its global tokens; kept paths are scaled."""
    rate = 0.25
    block = small_vil("two_globals").stages[1].blocks[0]
    assert isinstance(block, Block)
    block.drop_path_rate = rate
    block.train()
    tokens, global_tokens = random_images(64, 5, 7, 8), random_images(64, 2, 8, seed=2)
    torch.manual_seed(0)
    output, global_output = block(tokens, global_tokens)

    update, global_update = block.attention(block.attention_norm(tokens), block.attention_norm(global_tokens))

    def outcome(attention_kept: int, mlp_kept: int, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        x = x + attention_kept / (1 - rate) * change
        return x + mlp_kept / (1 - rate) * block.mlp(block.mlp_norm(x))

    count = {}
    for kept in ((0, 0), (0, 1), (1, 0), (1, 1)):
        local = (output - outcome(*kept, tokens, update)).abs().amax(dim=(1, 2, 3)) < 1e-12
        globals_ = (global_output - outcome(*kept, global_tokens, global_update)).abs().amax(dim=(1, 2)) < 1e-12
        assert torch.equal(local, globals_)
        count[kept] = int(local.sum())
    assert sum(count.values()) == 64
    assert min(count.values()) > 0 and count[1, 1] > 24  # 36 on average


@families
def test_activation_checkpointing_changes_no_gradient(family):
    images, results = random_images(4, 3, 37, 50), []
    for checkpointing in (False, True):
        model = small_vil(family, drop_path_rate=0.5, activation_checkpointing=checkpointing).train()
        torch.manual_seed(0)
        results.append(map_gradients(model, images))
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        other = results[1][name]
        # A block whose path all images drop has none.
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(other, gradient, atol=1e-12, rtol=1e-12)


def test_activation_checkpointing_keeps_less():
    kept = {}
    for checkpointing in (False, True):
        model = small_vil(activation_checkpointing=checkpointing).train()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            model(random_images(1, 3, 96, 128))
        kept[checkpointing] = sum(sizes)
    assert kept[True] < kept[False] / 4


@pytest.mark.parametrize(
    "out_features, message",
    [
        (("stage2", "stage5"), "unknown feature 'stage5': it is one of stage1, stage2, stage3, stage4; did you mean"),
        (("p3",), "unknown feature 'p3': it is one of stage1"),
        ((), "out_features is empty"),
    ],
)
def test_unknown_features_raise(out_features, message):
    with pytest.raises(InputError, match=message):
        ViL(small_variant(), Settings(out_features=out_features))
