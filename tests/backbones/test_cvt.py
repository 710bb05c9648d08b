"""CvT with long-short attention: its head, its statistics, its projections, and the sizes that the paper prints."""

import pytest
import torch

from backbones.layers.conv import StandardisedConv2d
from tests.backbones.families import small_model
from tests.backbones.helpers import assert_all_close, map_gradients, random_images


def test_both_attention_backends_give_the_same_gradients():
    images = random_images(2, 3, 37, 50)
    expected = map_gradients(small_model("cvt", attention_backend="reference").train(), images)
    assert_all_close(map_gradients(small_model("cvt").train(), images), expected, tolerance=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_counts_its_batch_once(checkpointing):
    """The second forward pass of activation checkpointing leaves the batch statistics alone."""
    images = random_images(4, 3, 37, 50)
    model = small_model("cvt", activation_checkpointing=checkpointing, drop_path_rate=0.5).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(0)
    map_gradients(model, images)
    after = dict(model.named_buffers())
    plain = small_model("cvt", drop_path_rate=0.5).train()
    torch.manual_seed(0)
    with torch.no_grad():
        plain(images)
    assert_all_close(after, dict(plain.named_buffers()), tolerance=1e-12)
    assert all(not torch.equal(after[name], before[name]) for name in before if name.endswith("running_mean"))


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("train_first", [False, True])
def test_frozen_stages_keep_weights_and_statistics(number, train_first):
    model = small_model("cvt", drop_path_rate=0.5)
    if train_first:
        model.train()
    model.freeze_stages(number)
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if number == 3:
        with torch.no_grad():
            model(random_images(4, 3, 37, 50))
    else:
        torch.manual_seed(0)
        gradients = map_gradients(model, random_images(16, 3, 37, 50))
        for name, gradient in gradients.items():
            assert (gradient is None) == (int(name.split(".")[1]) < number), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) == (int(name.split(".")[1]) < number), name
    model.eval()
    assert not any(module.training for module in model.modules())


def test_dynamic_projection_has_standardised_weights_and_no_bias():
    model = small_model("cvt")
    modules = dict(model.named_modules())
    standardised = [name for name, module in modules.items() if isinstance(module, StandardisedConv2d)]
    assert standardised == [
        f"stages.{s}.blocks.{b}.attention.dynamic_projection.depthwise" for s, b in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert not [name for name, _ in model.named_parameters() if "dynamic_projection" in name and "bias" in name]
