"""The Triton kernels of attention with a learned bias in Triton's interpreter: strides, blocks, and LIT."""

import pytest
import torch

from backbones.attention import reference, triton_dense
from backbones.attention.triton_dense import Launch, rows_per_group, triton_map_attention
from backbones.backbone import BackboneSettings
from backbones.lit import LIT, LITStage, LITVariant
from tests.backbones.attention.test_triton import trained
from tests.backbones.attention.triton_cases import assert_equals_reference, assert_near, interpreted, map_inputs
from tests.backbones.helpers import assert_all_close, outputs_and_gradients, random_images, randomize


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("queries, keys", [(16, 16), (16, 32), (32, 16)])
def test_blocks_of_other_sizes(monkeypatch, queries, keys):
    """With partial sums of the gradient of the bias for two shares of the images."""
    monkeypatch.setattr(triton_dense, "launch_parameters", lambda *args: Launch(queries, keys, num_warps=4))
    assert_equals_reference("dense", map_inputs(5, 7, num_global=17, batch=3), {})
    monkeypatch.setattr(triton_dense, "_PROGRAMS", 2 * 3 * (5 if keys == 16 else 3))
    assert_equals_reference("dense", map_inputs(2, 11, num_global=1, batch=3), {})


@interpreted
def test_inputs_of_any_strides_and_no_other_memory_are_read():
    """The inputs are views of one projection, and slices of tensors of NaNs, which would show in the output if read."""
    inputs = map_inputs(3, 5, num_global=1, heads=2)
    expected = outputs_and_gradients(reference.map_attention, inputs)
    tokens = torch.full((1, 18, 3, 2, 16), float("nan"), dtype=torch.float64)
    tokens[:, 1:17, 1], tokens[:, 1:17, 2] = inputs["key"].transpose(1, 2), inputs["value"].transpose(1, 2)
    tokens[:, 2:17, 0] = inputs["query"].flatten(2, 3).transpose(1, 2)
    query, inputs["key"], inputs["value"] = tokens[:, 1:17].permute(2, 0, 3, 1, 4)
    inputs["query"] = query[:, :, 1:].unflatten(2, (3, 5))
    table = torch.full((7, 11, 4), float("nan"), dtype=torch.float64)
    table[1:6, 1:10, ::2] = inputs["local_bias"].movedim(0, -1)
    inputs["local_bias"] = table[1:6, 1:10, ::2].movedim(-1, 0)
    inputs["global_bias"] = inputs["global_bias"].T.contiguous().T
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output = triton_map_attention(**leaves)
    # The merge of the heads is a view.
    assert output.transpose(1, 2).is_contiguous()
    output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape))
    assert_near({"output": output.detach()} | {f"gradient of {name}": x.grad for name, x in leaves.items()}, expected)


def test_rows_per_group():
    """Groups fill blocks of queries, with little memory."""
    assert [rows_per_group(50, width, 64) for width in (84, 42, 14, 64)] == [3, 3, 4, 1]
    assert rows_per_group(1, 14, 64) == 1


@pytest.mark.slow
@interpreted
def test_lit():
    """A model whose tables are resized to the feature maps."""
    stages = LITStage(1, 8), LITStage(1, 8), LITStage(1, 16, heads=2), LITStage(2, 16, heads=1)
    variant = LITVariant(stages, relative_bias=True, norm_eps=1e-5, output_norms=(), position_img_size=64)
    results = []
    for backend in ("triton", "reference"):
        model = randomize(LIT(variant, BackboneSettings(attention_backend=backend))).double()
        results.append(trained(model, random_images(1, 3, 70, 100)))
    assert_all_close(*results, tolerance=1e-9)
