"""The MLP of a block, whose backward pass computes the GELU again."""

import pytest
import torch

from backbones.layers.block import GeluLinear, Mlp


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    """Hidden features (2, 3, 5), a weight (4, 5) and a bias (4,) in float64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).double().requires_grad_() for shape in ((2, 3, 5), (4, 5), (4,))]


def test_values_and_gradients(inputs):
    assert torch.autograd.gradcheck(GeluLinear.apply, inputs)
    mlp = Mlp(4, hidden_dim=5).double()
    tokens = torch.randn(2, 3, 4).double()
    expected = mlp(tokens)
    torch.testing.assert_close(GeluLinear.apply(mlp.fc1(tokens), mlp.fc2.weight, mlp.fc2.bias), expected)


@pytest.mark.parametrize("frozen", [(0,), (1, 2)])
def test_frozen_inputs_have_no_gradient(inputs, frozen):
    inputs = [x.detach() if i in frozen else x for i, x in enumerate(inputs)]
    GeluLinear.apply(*inputs).sum().backward()
    assert [x.grad is None for x in inputs] == [i in frozen for i in range(3)]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_and_adapters_of_the_second_layer_are_called(register):
    """The meta device takes the path of a GPU."""
    mlp, called = Mlp(4, hidden_dim=5).to("meta"), []
    tokens = torch.rand(2, 3, 4, device="meta")
    getattr(mlp.fc2, register)(lambda *inputs: called.append(1))
    assert mlp(tokens).shape == tokens.shape and called == [1]
    mlp.fc2 = torch.nn.Sequential(mlp.fc2)
    assert mlp(tokens).shape == tokens.shape and called == [1, 1]
