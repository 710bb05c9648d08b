"""Helpers of the backbone tests: random inputs and weights, comparisons, traces, and a small ViL."""

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backbones.attention.efficient import redraw_features
from backbones.backbone import BackboneSettings
from backbones.vil import ViL, ViLStage, ViLVariant

# Named options for :func:`small_vil`.
FAMILIES = {
    "absolute": {},
    "relative": {"relative_bias": True, "global_tokens": (1, 1, 1, 0)},
    "no_globals": {"global_tokens": 0, "relative_bias": True},
    "one_global": {"global_tokens": 1, "relative_bias": True},
    "two_globals": {"global_tokens": 2, "relative_bias": True},
    "many_globals": {"global_tokens": 5},
    "separate": {"global_tokens": 2, "shared_projections": False, "relative_bias": True},
    "exact": {"attention_mode": "exact", "relative_bias": True},
    "cyclic": {"attention_mode": "cyclic"},
    "dense": {"attention": "dense"},
    "dense_relative": {"attention": "dense", "relative_bias": True, "global_tokens": 2},
    "long_short": {"attention": "long_short", "global_tokens": 2},
    "long_short_relative": {"attention": "long_short", "relative_bias": True, "global_tokens": (1, 1, 1, 0)},
    "global": {"attention": "global", "global_tokens": 3},
    "spatial_reduction": {"attention": "spatial_reduction", "reduction": (4, 3, 2, 1)},
    "performer": {"attention": "performer", "num_features": 10, "global_tokens": (1, 1, 1, 0)},
    # Two global tokens, because the softmax over one is always 1.
    "partial": {"attention": ("performer", "global", "dense", "dense"), "global_tokens": 2},
}


def attention_inputs(
    height: int,
    width: int,
    *,
    chunk_size: int = 3,
    num_global: int = 0,
    local_bias: bool = False,
    global_bias: bool = False,
    batch: int = 2,
    heads: int = 2,
    channels: int = 4,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return random float64 arguments of ``sliding_chunk_attention``. Optional ones are included on request."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = {name: normal(batch, heads, height, width, channels) for name in ("query", "key", "value")}
    if num_global:
        inputs |= {name: normal(batch, heads, num_global, channels) for name in ("global_key", "global_value")}
    if local_bias:
        inputs["local_bias"] = normal(heads, chunk_size**2, 9 * chunk_size**2)
    if global_bias:
        inputs["global_bias"] = normal(heads, num_global)
    return inputs


def outputs_and_gradients(function: Callable, inputs: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """Return the output of ``function(**inputs)``, and the gradient of each input for a weighted sum of the output."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    output = function(**leaves, **options)
    weights = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    (output * weights.to(output)).sum().backward()
    return {"output": output.detach()} | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def assert_all_close(actual: dict, expected: dict, *, tolerance: float) -> None:
    """Check for equal names, shapes and dtypes, and values within ``tolerance``."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(actual[name], value, atol=tolerance, rtol=tolerance, msg=message)


def assert_padding_is_hidden_in_half_precision(
    attend: Callable, attend_by_reference: Callable, inputs: dict[str, Tensor], *, dtype: torch.dtype, autocast: bool
) -> None:
    """Check padding if all scores of tokens are near -1.2e4 (64 channels), so that padding with score 0 would dominate.

    The values are constant. Rounded scores then have no effect on the output, but padded zeros have.
    """
    side = (1.2e4 / 8) ** 0.5
    sides = {"query": side, "key": -side, "projected_key": -side, "global_key": -side}
    inputs = {name: torch.full_like(x, sides.get(name, 1.0)) if "bias" not in name else x for name, x in inputs.items()}
    expected = outputs_and_gradients(attend_by_reference, inputs)
    rounded = {name: x.to(torch.float32 if autocast else dtype) for name, x in inputs.items()}
    with torch.autocast("cpu", dtype, enabled=autocast):
        actual = outputs_and_gradients(attend, rounded)
    assert actual["output"].dtype == dtype
    torch.testing.assert_close(actual["output"].double(), expected["output"], atol=1e-2, rtol=0)
    total = actual["gradient of value"].double().sum(dim=(0, 1, 2, 3))
    torch.testing.assert_close(total, expected["gradient of value"].sum(dim=(0, 1, 2, 3)), atol=0.5, rtol=0.1)
    assert all(x.isfinite().all() for x in actual.values())


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns, in the forward or backward pass.

    ``nbytes`` is the size of the largest storage. A view may have more elements than its storage.
    """

    numel = nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors)])
        self.nbytes = max([self.nbytes, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        return result


def trace(function: Callable, example: tuple[Tensor, ...]) -> torch.jit.ScriptFunction:
    """Call ``torch.jit.trace``. If the tracer warns that our code makes a size constant, the test fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(function, example, check_trace=False, strict=False)
    frozen = [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if w.category is torch.jit.TracerWarning]
    assert not frozen, "\n".join(frozen)
    return traced


def randomize(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Fill every parameter with different values, because a parameter of 0 or 1 could hide an error.

    Random features are resampled too.
    """
    generator = torch.Generator().manual_seed(seed)
    redraw_features(model, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1 and name.endswith("weight"):
                values = values / math.sqrt(parameter[0].numel())
            else:
                values = 0.3 * values + (1 if name.endswith("norm.weight") else 0)
            parameter.copy_(values)
    return model


def small_variant(
    *,
    attention: str | tuple[str, ...] = "sliding_chunk",
    relative_bias: bool = False,
    reduction: tuple[int, ...] = (1, 1, 1, 1),
    num_features: int = 256,
    **options,
) -> ViLVariant:
    """Return a variant of four stages with few channels and chunk size 3; see ``ViLVariant.with_options``."""
    sizes = ((1, 4, 1, 4), (2, 2, 2, 8), (1, 2, 2, 8), (1, 2, 4, 16))
    mechanisms = (attention,) * 4 if isinstance(attention, str) else attention
    common = {"chunk_size": 3, "projection_rank": 2, "num_features": num_features}
    stages = (
        ViLStage(*size, attention=mechanism, reduction=ratio, **common)
        for size, mechanism, ratio in zip(sizes, mechanisms, reduction, strict=True)
    )
    return ViLVariant(tuple(stages), relative_bias=relative_bias).with_options(**options)


def small_vil(family: str = "relative", *, max_img_size: tuple[int, int] = (160, 160), **options) -> ViL:
    """Return a small ViL in eval mode with random float64 weights. ``options`` are :class:`.BackboneSettings`."""
    model = ViL(small_variant(**FAMILIES[family]), BackboneSettings(max_img_size=max_img_size, **options))
    return randomize(model).double().eval()


def random_images(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def map_gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each parameter, or None, for a weighted sum of all feature maps."""
    model.zero_grad(set_to_none=True)
    maps = model(images).values()
    sum((m * torch.sin(torch.arange(m.numel(), dtype=m.dtype)).view(m.shape)).sum() for m in maps).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def without(prefix: str) -> Callable[[dict], dict]:
    """Return a function that leaves out the names of a state dict that start with a prefix."""
    return lambda weights: {key: tensor for key, tensor in weights.items() if not key.startswith(prefix)}


def with_tensor(name: str, *shape: int, value: float = 0.0, dtype=torch.float64) -> Callable[[dict], dict]:
    """Return a function that adds a constant tensor to a state dict."""
    return lambda weights: weights | {name: torch.full(shape, value, dtype=dtype)}
