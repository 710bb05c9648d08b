"""Both Triton operators in Triton's interpreter: gradients, infinite biases, empty batches, and the registration."""

import functools

import pytest
import torch

from backbones.attention import reference
from backbones.attention.triton_chunks import WindowInputs, triton_chunk_attention
from backbones.attention.triton_dense import triton_map_attention
from tests.backbones.attention.triton_cases import ALL_INPUTS, assert_near, map_inputs
from tests.backbones.helpers import attention_inputs, outputs_and_gradients
from tests.selection import slow_except

# The operator, its reference, and a function of height and width for its inputs.
OPERATORS = {
    "chunks": (
        functools.partial(triton_chunk_attention, chunk_size=3),
        functools.partial(reference.sliding_chunk_attention, chunk_size=3),
        functools.partial(attention_inputs, batch=1, **ALL_INPUTS),
    ),
    "dense": (triton_map_attention, reference.map_attention, functools.partial(map_inputs, num_global=1)),
}
pytestmark = pytest.mark.usefixtures("interpreter")
operators = pytest.mark.parametrize("name", OPERATORS)


@pytest.mark.parametrize("name", slow_except(OPERATORS, ["dense"]))
@pytest.mark.parametrize(
    "learned", [("query", "global_key"), ("key", "global_bias"), ("value",), ("local_bias",), ("global_bias",)], ids=str
)
def test_gradients_of_some_inputs(name, learned):
    operator, by_reference, make = OPERATORS[name]
    inputs = make(2, 5, heads=1)
    learned = inputs.keys() & learned
    expected = outputs_and_gradients(by_reference, inputs)
    leaves = {key: x.detach().requires_grad_(key in learned) for key, x in inputs.items()}
    output = operator(**leaves)
    output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape))
    gradients = {f"gradient of {key}": x.grad for key, x in leaves.items() if x.grad is not None}
    assert_near(gradients, {f"gradient of {key}": expected[f"gradient of {key}"] for key in learned})


@operators
def test_bias_of_minus_infinity_hides_keys(name):
    operator, by_reference, make = OPERATORS[name]
    inputs = make(3, 5, heads=1)
    inputs["local_bias"][..., ::2] = inputs["global_bias"][:] = float("-inf")
    assert_near(outputs_and_gradients(operator, inputs), outputs_and_gradients(by_reference, inputs))


@operators
def test_no_images(name):
    operator, _, make = OPERATORS[name]
    inputs = {key: x if "bias" in key else x[:0] for key, x in make(4, 7, heads=2).items()}
    actual = outputs_and_gradients(operator, inputs)
    assert actual["output"].shape == ((0, 2, 4, 7, 4) if name == "chunks" else (0, 2, 28, 16))
    assert not actual["gradient of local_bias"].any() and not actual["gradient of global_bias"].any()


@pytest.mark.parametrize("name", slow_except(OPERATORS, ["dense"]))
def test_operator_is_registered_as_pytorch_wants_it(name):
    inputs = {key: x.requires_grad_() for key, x in OPERATORS[name][2](2, 5, heads=1).items()}
    if name == "chunks":
        arguments = (*(inputs[key] for key in WindowInputs._fields), 3, "zero_pad", None)
    else:
        arguments = (inputs.pop("query").flatten(2, 3).detach().requires_grad_(), *inputs.values())
    torch.library.opcheck(getattr(torch.ops.backbones, f"triton_{name}").default, arguments)


@pytest.mark.slow
@operators
def test_compiled_models_trace_through_the_operator(name):
    """There is no graph break for any size of the feature map, and outputs and gradients equal eager mode."""
    operator, _, make = OPERATORS[name]
    torch.compiler.reset()
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True, dynamic=True)
    options = {"shift": (0, 1)} if name == "chunks" else {}
    for height, width in ((2, 5), (4, 7)):
        inputs = make(height, width, batch=2, heads=2)
        actual = outputs_and_gradients(compiled, inputs, **options)
        assert_near(actual, outputs_and_gradients(operator, inputs, **options))
