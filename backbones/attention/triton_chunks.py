"""Vision Longformer attention (ViL section 3.2) by Triton kernels, for CUDA devices.

Scores are never in memory: the forward pass keeps outputs and log-sum-exps, and the backward pass makes scores again.
Keys are neither padded nor copied. Results are the same from run to run. :mod:`.triton_kernels` has the kernels; it is
imported where they first run, so that all else works where triton is absent.

Shapes: B images, M heads, H x W tokens, D channels per head, G global tokens, chunks of w x w = P positions, each
of which sees S tokens.
"""

import dataclasses
import functools
import importlib.util
import os
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.attention.blocked import RecomputedAttention, in_autocast_dtype
from backbones.attention.chunks import MODES, WindowInputs
from backbones.errors import ConfigError, check_choice

_MAX_CHANNELS = 128
# Programs that sum a gradient over the map: enough for the largest devices, and the same on all.
_SHARES = 1024


def unmet_requirement(device: torch.device) -> str | None:
    """Return in words what ``device`` lacks for the kernels, or None where they run.

    They run on CUDA devices, or where Triton interprets them.
    """
    if not _is_installed():
        return "triton, which is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA device, not {device.type!r}"
    return None


@torch.compiler.disable
def triton_chunk_attention(
    *, window_size: int, mode: str = "zero_pad", shift: tuple[int, int] | None = None, **tensors: Tensor | None
) -> Tensor:
    """The contract of :func:`backbones.attention.sliding_chunk.sliding_chunk_attention`, for D of at most 128.

    Tensors may have any strides. Sums are of float32, or of float64 for float64, which only the interpreter takes;
    products of float32 are not rounded to TensorFloat-32. Gradients cannot be differentiated once more.

    Returns:
        (B, M, H, W, D), which lies in memory as (B, H, W, M, D).

    Raises:
        ConfigError: for an unknown mode, larger D, a device that has no Triton, or float64 on a GPU.
    """
    check_choice("attention mode", mode, MODES)
    inputs = WindowInputs(*in_autocast_dtype(*WindowInputs(**tensors)))
    device, dtype, channels = inputs.query.device, inputs.query.dtype, inputs.query.shape[4]
    requirement = unmet_requirement(device)
    if requirement is not None:
        raise ConfigError(f"Triton attention needs {requirement}: use attention_backend 'sdpa'")
    if channels > _MAX_CHANNELS:
        raise ConfigError(
            f"Triton attention takes heads of at most {_MAX_CHANNELS} channels, and not of {channels}: use "
            "attention_backend 'sdpa'"
        )
    if dtype == torch.float64 and device.type == "cuda":
        raise ConfigError("Triton attention takes no float64 on a GPU: use attention_backend 'sdpa'")
    if inputs.global_key is None or not inputs.global_key.shape[2]:
        inputs = inputs._replace(global_key=None, global_value=None, global_bias=None)
    if shift is not None and inputs.local_bias is not None:
        # (M, P, 9 * P) -> (M, P, S)
        chunks = inputs.local_bias.unflatten(2, (3, window_size, 3, window_size))
        parts = [chunks[:, :, 1 + row, :, 1 + col].flatten(2) for row, col in ((0, 0), shift)]
        inputs = inputs._replace(local_bias=torch.cat(parts, dim=2))
    layout = _SeenTokens(window_size, mode, shift)
    functions = functools.partial(_forward, layout), functools.partial(_backward, layout)
    if dtype == torch.bfloat16 and device.type != "cuda":
        # Triton's interpreter multiplies it as if it were integers.
        return RecomputedAttention.apply(*functions, *(x if x is None else x.float() for x in inputs)).bfloat16()
    return RecomputedAttention.apply(*functions, *inputs)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> ModuleType:
    from backbones.attention import triton_kernels

    return triton_kernels


@dataclasses.dataclass(frozen=True)
class _SeenTokens:
    """The tokens that a chunk sees: all nine chunks, or its own and the one at ``shift``."""

    window_size: int
    mode: str
    shift: tuple[int, int] | None

    @property
    def positions(self) -> int:
        return self.window_size**2

    @property
    def seen(self) -> int:
        return self.positions * (9 if self.shift is None else 2)

    def mirrored_bias(self, bias: Tensor) -> Tensor:
        """(M, P, S), positions of queries by slots of keys -> the same, positions of keys by slots of queries."""
        size = self.window_size
        if self.shift is not None:
            return bias.unflatten(2, (2, -1)).transpose(1, 3).flatten(2)
        # The position and the slot as row and column in the chunk; the step to the chunk down and to the right.
        bias = bias.unflatten(2, (3, size, 3, size)).unflatten(1, (size, size))
        return bias.flip(3, 5).permute(0, 4, 6, 3, 1, 5, 2).flatten(3).flatten(1, 2)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the kernels are compiled: sizes of blocks, each a power of two of at least 16, and compiler options.

    Attributes:
        positions: block size along the positions of a chunk.
        tokens: block size along the tokens that a chunk sees, or that see a global token.
        global_tokens: block size along the global tokens.
        channels: D rounded up to a power of two; the channels beyond D are masked.
    """

    positions: int
    tokens: int
    global_tokens: int
    channels: int
    num_warps: int
    num_stages: int


def launch_parameters(window_size: int, channels: int, dtype: torch.dtype) -> Launch:
    """Return block sizes chosen by the compiler's register and shared-memory use on sm_80 and sm_90.

    They are not tuned on a GPU.
    """
    padded = _power_of_two(channels)
    # Larger blocks do not fit in the registers; least of all with float32, of which no tensor core makes the products.
    is_single, is_wide = dtype == torch.float32, padded > 64
    if is_single:
        positions, tokens = 32, 16 if is_wide else 32
    else:
        positions, tokens = 32 if is_wide else 64, 64 if padded <= 32 else 32
    return Launch(
        positions=min(_power_of_two(window_size**2), positions),
        tokens=tokens,
        global_tokens=16,
        channels=padded,
        num_warps=8 if is_single and is_wide else 4,
        num_stages=2,
    )


def _power_of_two(number: int) -> int:
    """The least that holds ``number``, and 16."""
    return max(16, 1 << (number - 1).bit_length())


def _forward(layout: _SeenTokens, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    return _KernelLauncher(layout, WindowInputs(*tensors)).forward()


def _backward(
    layout: _SeenTokens,
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    needed: tuple[bool, ...],
    *tensors: Tensor | None,
) -> WindowInputs:
    launcher, needed = _KernelLauncher(layout, WindowInputs(*tensors)), WindowInputs(*needed)
    query_grad, delta = launcher.query_grad(grad, output, logsumexp)
    gradients = {"query": query_grad, "key": None, "value": None}
    if needed.key or needed.value:
        gradients |= launcher.key_grads(grad, logsumexp, delta)
    if needed.global_key or needed.global_value or needed.global_bias:
        gradients |= launcher.global_grads(grad, logsumexp, delta)
    if needed.local_bias:
        gradients |= launcher.local_bias_grad(grad, logsumexp, delta)
    return WindowInputs(**gradients)


class _KernelLauncher:
    """Launches the kernels for some tensors."""

    def __init__(self, layout: _SeenTokens, inputs: WindowInputs) -> None:
        self.layout = layout
        self.inputs = inputs = inputs._replace(
            **{name: x.contiguous() for name, x in inputs._asdict().items() if x is not None and "global" in name}
        )
        self.batch, self.heads, self.height, self.width, self.channels = inputs.query.shape
        self.num_global = 0 if inputs.global_key is None else inputs.global_key.shape[2]
        self.launch = launch_parameters(layout.window_size, self.channels, inputs.query.dtype)
        self.chunks = -(-self.height // layout.window_size) * -(-self.width // layout.window_size)
        self.acc_dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
        self.position_blocks = -(-layout.positions // self.launch.positions)
        self.grid = self.chunks * self.position_blocks, self.heads, self.batch
        bias = inputs.local_bias
        self.own_bias = None if bias is None else self._with_pitch(bias)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, (B, M, H, W, D), and log-sum-exps to base 2, (B, H, W, M)."""
        output, logsumexp = self._new_map(), self._new_sums()
        pointers = (*self.inputs[:5], self.own_bias, self.inputs.global_bias, output, logsumexp)
        self._start(
            "forward_kernel",
            self.grid,
            *pointers,
            *self._sizes(self.inputs[:3], self.layout.shift),
            **self._constants(True),
        )
        return output, logsumexp

    def query_grad(self, grad: Tensor, output: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of queries, and delta, the products of outputs with their gradients, (B, H, W, M)."""
        query_grad, delta = self._new_map(), self._new_sums()
        pointers = (*self.inputs[:5], self.own_bias, self.inputs.global_bias)
        pointers += (output, logsumexp, grad, query_grad, delta)
        sizes = self._sizes((*self.inputs[:3], grad), self.layout.shift)
        self._start("query_grad_kernel", self.grid, *pointers, *sizes, **self._constants(True))
        return query_grad, delta

    def key_grads(self, grad: Tensor, logsumexp: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """The gradients of keys and of values."""
        key_grad, value_grad = self._new_map(), self._new_map()
        bias, shift = self.inputs.local_bias, self.layout.shift
        bias = None if bias is None else self._with_pitch(self.layout.mirrored_bias(bias))
        pointers = (*self.inputs[:3], bias, logsumexp, delta, grad, key_grad, value_grad)
        # A chunk is seen by the neighbour on its other side.
        sizes = self._sizes((*self.inputs[:3], grad), shift and (-shift[0], -shift[1]))
        self._start("key_grad_kernel", self.grid, *pointers, *sizes, **self._constants())
        return {"key": key_grad, "value": value_grad}

    def local_bias_grad(self, grad: Tensor, logsumexp: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """The gradient of the local bias, of float32 or better: first over shares of the chunks."""
        blocks = self.position_blocks * -(-self.layout.seen // self.launch.tokens)
        shares = max(1, min(_SHARES // (blocks * self.heads), self.batch * self.chunks))
        partial = self._new_sums(shares, self.heads, self.layout.positions, self.layout.seen)
        pointers = (*self.inputs[:3], self.own_bias, logsumexp, delta, grad, partial)
        sizes = self._sizes((*self.inputs[:3], grad), self.layout.shift, self.batch)
        self._start("local_bias_grad_kernel", (blocks, self.heads, shares), *pointers, *sizes, **self._constants())
        return {"local_bias": partial.sum(0)}

    def global_grads(self, grad: Tensor, logsumexp: Tensor, delta: Tensor) -> dict[str, Tensor | None]:
        """The gradients of global keys, values and biases, of float32 or better: first over shares of the tokens."""
        query, _, _, global_key, global_value, _, global_bias = self.inputs
        blocks = -(-self.num_global // self.launch.global_tokens)
        most = -(-self.height * self.width // self.launch.tokens)
        shares = max(1, min(_SHARES // max(1, blocks * self.heads * self.batch), most))
        shape = (shares, self.batch, self.heads, self.num_global)
        key_partial, value_partial = (self._new_sums(*shape, self.channels) for _ in range(2))
        bias_partial = None if global_bias is None else self._new_sums(*shape)
        self._start(
            "global_grad_kernel",
            (shares * blocks, self.heads, self.batch),
            *(query, global_key, global_value, global_bias),
            *(logsumexp, delta, grad, key_partial, value_partial, bias_partial),
            *(*query.stride(), *grad.stride()),
            *(self.height, self.width),
            GLOBALS=self.num_global,
            CHANNELS=self.channels,
            SCALE=self.channels**-0.5,
            TOKENS_BLOCK=self.launch.tokens,
            GLOBALS_BLOCK=self.launch.global_tokens,
            CHANNELS_BLOCK=self.launch.channels,
        )
        bias_grad = None if bias_partial is None else bias_partial.sum((0, 1))
        return {"global_key": key_partial.sum(0), "global_value": value_partial.sum(0), "global_bias": bias_grad}

    def _start(self, name: str, grid: tuple[int, int, int], *args: Tensor | int | None, **constants) -> None:
        if not all(grid):
            return
        kernels = _kernels()
        constants["ACC_DTYPE"] = kernels.tl.float64 if self.acc_dtype == torch.float64 else kernels.tl.float32
        compiled = {"num_warps": self.launch.num_warps, "num_stages": self.launch.num_stages, "enable_fp_fusion": True}
        with torch.cuda.device_of(self.inputs.query):
            getattr(kernels, name)[grid](*args, **constants, **compiled)

    def _sizes(self, maps: tuple[Tensor, ...], shift: tuple[int, int] | None = None, *batches: int) -> tuple[int, ...]:
        """Return the arguments of the kernels over chunks that follow the pointers: strides of maps, and sizes."""
        strides = (stride for x in maps for stride in x.stride())
        return *strides, *batches, self.height, self.width, *(shift or (0, 0))

    def _constants(self, has_globals: bool = False) -> dict[str, object]:
        """Return the compile-time constants of the kernels over chunks."""
        global_constants = {"GLOBALS": self.num_global, "GLOBALS_BLOCK": self.launch.global_tokens}
        return {
            "WINDOW": self.layout.window_size,
            "SEEN": self.layout.seen,
            "PITCH": self._pitch(),
            "CHANNELS": self.channels,
            "SCALE": self.channels**-0.5,
            "EXACT": self.layout.mode == "exact",
            "CYCLIC": self.layout.mode == "cyclic",
            "POSITIONS_BLOCK": self.launch.positions,
            "SEEN_BLOCK": self.launch.tokens,
            "CHANNELS_BLOCK": self.launch.channels,
            **(global_constants if has_globals else {}),
        }

    def _pitch(self) -> int:
        """Return the stride between two positions of a bias: a multiple of the block, so that rows are aligned."""
        return -(-self.layout.seen // self.launch.tokens) * self.launch.tokens

    def _with_pitch(self, bias: Tensor) -> Tensor:
        """(M, P, S) -> (M, P, PITCH), contiguous."""
        return F.pad(bias, (0, self._pitch() - self.layout.seen)).contiguous()

    def _new_map(self) -> Tensor:
        """(B, M, H, W, D), which lies in memory as (B, H, W, M, D)."""
        shape = (self.batch, self.height, self.width, self.heads, self.channels)
        return self.inputs.query.new_empty(shape).permute(0, 3, 1, 2, 4)

    def _new_sums(self, *shape: int) -> Tensor:
        """A tensor for sums; (B, H, W, M) without ``shape``."""
        shape = shape or (self.batch, self.height, self.width, self.heads)
        return self.inputs.query.new_empty(shape, dtype=self.acc_dtype)
