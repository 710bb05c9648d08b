"""Attention kernels with their references, and random arguments for both."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backbones.attention import reference
from backbones.attention.dense import dense_attention, join_tokens, split_globals
from backbones.attention.long_short import long_short_attention
from backbones.attention.sliding_chunk import sliding_chunk_attention
from tests.backbones.helpers import attention_inputs, random_images

# Options of sliding chunks, with all neighbors and with one; the other two kernels have none.
WINDOWS = {
    "zero_pad": {},
    "exact": {"mode": "exact"},
    "cyclic": {"mode": "cyclic"},
    "shift": {"shift": (0, 1)},
    "exact_shift": {"mode": "exact", "shift": (-1, -1)},
    "cyclic_shift": {"mode": "cyclic", "shift": (1, 0)},
    "long_short": None,
}
KERNELS = {**WINDOWS, "dense": None}

windows = pytest.mark.parametrize("kernel", WINDOWS)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def side_of(chunk_size: int) -> int:
    return max(chunk_size // 2, 1)


def case(
    kernel: str,
    height: int = 7,
    width: int = 11,
    *,
    num_global: int = 1,
    biases: bool = True,
    chunk_size: int = 3,
    shift: tuple[int, int] | None = None,
    **sizes: int,
) -> tuple[Callable, Callable, dict[str, Tensor]]:
    """Return a kernel, its reference and float64 arguments for both. ``shift`` replaces the shift of the kernel."""
    sizes = {"batch": 2, "heads": 2, "channels": 4} | sizes
    batch, heads, channels = sizes.values()
    if kernel == "dense":
        shape = (batch, heads, num_global + height * width, channels)
        inputs = {name: random_images(*shape, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
        if biases:
            inputs["bias"] = random_images(heads, shape[2], shape[2])
        return dense_attention, reference.attention, inputs
    if kernel == "long_short":
        inputs = attention_inputs(height, width, **sizes)
        for seed, name in enumerate(("projected_key", "projected_value")):
            inputs[name] = random_images(batch, heads, 5 + num_global, channels, seed=seed)
        if biases:
            inputs["local_bias"] = random_images(heads, chunk_size**2, (chunk_size + 2 * side_of(chunk_size)) ** 2)
        functions, options = (long_short_attention, reference.long_short_attention), {}
    else:
        with_bias = {"local_bias": biases, "global_bias": biases and num_global > 0}
        inputs = attention_inputs(height, width, chunk_size=chunk_size, num_global=num_global, **with_bias, **sizes)
        functions, options = (sliding_chunk_attention, reference.sliding_chunk_attention), dict(KERNELS[kernel])
        if shift is not None:
            options["shift"] = shift
    return *(functools.partial(function, chunk_size=chunk_size, **options) for function in functions), inputs


class FakeGPU(TorchFunctionMode):
    """Context manager in which tensors on the CPU report that they are on a GPU.

    Attributes:
        cudnn, flash: Whether each call of PyTorch's attention may choose this kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cudnn, self.flash = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == Tensor.device.__get__:
            return torch.device("cuda:0")
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        if function is F.scaled_dot_product_attention:
            self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            self.flash.append(torch.backends.cuda.flash_sdp_enabled())
        return function(*args, **kwargs)


class OnMap(nn.Module):
    """An attention module on (B, H, W, C) and (B, G, C) or None -> the same, or None without updated global tokens."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        module, size = self.module, tokens.shape[1:3]
        num_global = module.num_global_tokens if module.update_globals else 0
        global_output, output = split_globals(module(join_tokens(tokens, global_tokens), size), num_global)
        return output.unflatten(1, size), global_output


def attend(module: nn.Module, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Call the module through :class:`OnMap`."""
    return OnMap(module)(tokens, global_tokens)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((actual.cpu().double() - expected).abs().max() / expected.abs().max()).item()
