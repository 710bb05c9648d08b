"""Launch the Triton kernels for attention to windows of ViL (section 3.2) and Transformer-LS (section 3), on CUDA.

Scores are never in memory. The forward pass keeps outputs and log-sum-exps, and the backward pass computes the scores
again. Keys are neither padded nor copied. Results do not vary from run to run. :mod:`.triton_kernels` has the kernels.
It is imported at their first use, because triton may not be installed.

Shapes: B images, M heads, H x W tokens, D channels per head, G global tokens, chunks of w x w = P positions. Each chunk
attends to S tokens.
"""

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from backbones.attention.chunks import WindowInputs
from backbones.errors import ConfigError
from backbones.layers.tracing import in_autocast_dtype

# The mode of long-short attention. Its windows have ``max(w // 2, 1)`` tokens around a chunk.
SEGMENT_MODE = "segment"
_MAX_CHANNELS = 128
# Programs that sum a gradient over the feature map: enough for the largest devices, and the same on all devices
_SHARES = 1024
# Block size along the global tokens
_GLOBALS_BLOCK = 16
# The lowest compute capability that the kernels are compiled for in the tests
_LEAST_CAPABILITY = (8, 0)


def unmet_requirement(device: torch.device, channels: int = 0, dtype: torch.dtype | None = None) -> str | None:
    """Return why the kernels cannot run with this device, head size or dtype, or None if they can.

    They run on CUDA devices, and on the CPU if Triton interprets them.

    Args:
        device: Device of the tensors.
        channels: Channels D of a head.
        dtype: Dtype of the queries.
    """
    is_cuda = device.type == "cuda"
    if not _is_installed():
        return "needs triton, which is not installed"
    if not is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, not {device.type!r}"
    if channels > _MAX_CHANNELS:
        return f"supports at most {_MAX_CHANNELS} channels per head, not {channels}"
    if is_cuda and torch.version.hip:
        return "does not support AMD GPUs"
    if is_cuda and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        return "needs compute capability 8.0 or higher, not {}.{}".format(*capability)
    return "does not support float64 on a GPU" if is_cuda and dtype == torch.float64 else None


def check_requirement(query: Tensor) -> None:
    """Raise a :class:`ConfigError` if the kernels cannot run for these queries (..., D)."""
    requirement = unmet_requirement(query.device, query.shape[-1], query.dtype)
    if requirement is not None:
        raise ConfigError(f"Triton attention {requirement}. Use attention_backend 'sdpa'.")


def triton_chunk_attention(
    *, chunk_size: int, mode: str = "zero_pad", shift: tuple[int, int] | None = None, **tensors: Tensor | None
) -> Tensor:
    """Return the result of :func:`.sliding_chunk.sliding_chunk_attention`, for heads of at most 128 channels.

    Tensors may have any strides. Sums are float32, or float64 for float64 inputs, which only the interpreter supports.
    Products of float32 are not rounded to TensorFloat-32. Gradients cannot be differentiated again. The forward and the
    backward pass are one operator each, so that ``torch.compile`` does not trace the kernels.

    Args:
        chunk_size: See :func:`.sliding_chunk.sliding_chunk_attention`.
        mode: See there.
        shift: See there.
        tensors: The tensor arguments of that function.

    Returns:
        (B, M, H, W, D), which lies in memory as (B, H, W, M, D).

    Raises:
        ConfigError: If D is larger, the device cannot run Triton, or the dtype is float64 on a GPU.
    """
    inputs = WindowInputs(**tensors)
    if inputs.global_key is None or not inputs.global_key.shape[2]:
        inputs = inputs._replace(global_key=None, global_value=None, global_bias=None)
    if shift is not None and inputs.local_bias is not None:
        # (M, P, 9 * P) -> (M, P, S)
        chunks = inputs.local_bias.unflatten(2, (3, chunk_size, 3, chunk_size))
        parts = [chunks[:, :, 1 + row, :, 1 + col].flatten(2) for row, col in ((0, 0), shift)]
        inputs = inputs._replace(local_bias=torch.cat(parts, dim=2))
    return _attend_in_autocast_dtype(inputs, chunk_size, mode, shift)


def triton_long_short_attention(
    *, chunk_size: int, projected_key: Tensor, projected_value: Tensor, **tensors: Tensor | None
) -> Tensor:
    """Return the result of :func:`.long_short.long_short_attention`. See :func:`triton_chunk_attention`.

    The kernels treat projected keys as global tokens.

    Args:
        chunk_size: See :func:`.long_short.long_short_attention`.
        projected_key: See there.
        projected_value: See there.
        tensors: The other tensor arguments of that function.

    Raises:
        ConfigError: If D is larger than 128, the device cannot run Triton, or the dtype is float64 on a GPU.
    """
    inputs = WindowInputs(global_key=projected_key, global_value=projected_value, **tensors)
    return _attend_in_autocast_dtype(inputs, chunk_size, SEGMENT_MODE, None)


def _attend_in_autocast_dtype(
    inputs: WindowInputs, chunk_size: int, mode: str, shift: tuple[int, int] | None
) -> Tensor:
    """Run the operator in the dtype that autocast chooses. Biases and their gradients keep their dtype."""
    # The kernels read a bias of each head.
    biases = (None if x is None else x.expand(inputs.query.shape[1], *x.shape[1:]) for x in inputs[5:])
    # Copy them once, not in each pass.
    inputs = _with_contiguous_globals(WindowInputs(*in_autocast_dtype(*inputs[:5]), *biases))
    return _attend(*inputs, chunk_size, mode, shift)


def _with_contiguous_globals(inputs: WindowInputs) -> WindowInputs:
    given = {name: x for name, x in inputs._asdict().items() if x is not None and name.startswith("global")}
    return inputs._replace(**{name: x.contiguous() for name, x in given.items()})


def define_operator(
    name: str,
    schema: str,
    num_tensors: int,
    *,
    launcher: Callable[..., Any],
    logsumexp_shape: Callable[[Tensor], tuple[int, ...]],
) -> Callable[..., Tensor]:
    """Return a function for attention with gradients. ``torch.compile`` sees the operator ``backbones::NAME``.

    Without ``torch.compile``, the function does not call the operator, which would take the host longer.

    Args:
        name: Name of the operator.
        schema: Schema of its arguments: first the queries, then other tensors, then options.
        num_tensors: Number of tensors in ``schema``.
        launcher: Returns an object for arguments. Its ``forward()`` returns the output and the log-sum-exps. Its
            ``backward(grad, output, logsumexp, needed)`` returns the gradients of the tensors. ``needed`` has one flag
            per tensor: whether its gradient is used.
        logsumexp_shape: Returns the shape of the log-sum-exps for queries.

    Returns:
        A function that returns the output.
    """

    def run_forward(*arguments: object) -> tuple[Tensor, Tensor]:
        check_requirement(arguments[0])
        return launcher(*arguments).forward()

    def run_backward(
        grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool], *arguments: object
    ) -> list[Tensor]:
        gradients = launcher(*arguments).backward(grad, output, logsumexp, needed)
        return [x.to(y.dtype) for x, y, is_needed in zip(gradients, arguments, needed, strict=False) if is_needed]

    define = functools.partial(torch.library.custom_op, mutates_args=())
    attend = define(f"backbones::{name}", run_forward, schema=f"({schema}) -> (Tensor, Tensor)")
    backward_schema = f"(Tensor grad, Tensor output, Tensor logsumexp, bool[] needed, {schema}) -> Tensor[]"
    attend_backward = define(f"backbones::{name}_backward", run_backward, schema=backward_schema)

    @attend.register_fake
    def _(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return new_map(query), new_sums(query, logsumexp_shape(query))

    @attend_backward.register_fake
    def _(
        grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool], query: Tensor, *others: object
    ) -> list[Tensor]:
        given = [x for x, is_needed in zip((query, *others), needed, strict=False) if is_needed]
        return [new_map(x) if x.dim() == query.dim() else x.new_empty(x.shape) for x in given]

    def save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:num_tensors], *output)
        ctx.options = inputs[num_tensors:]
        ctx.mark_non_differentiable(output[1])

    def gradients(
        attend_backward: Callable[..., list[Tensor]], ctx, grad: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, output, logsumexp = ctx.saved_tensors
        needed = ctx.needs_input_grad[:num_tensors]
        given = iter(attend_backward(grad, output, logsumexp, list(needed), *tensors, *ctx.options))
        return *(next(given) if is_needed else None for is_needed in needed), *(None for _ in ctx.options)

    attend.register_autograd(functools.partial(gradients, attend_backward), setup_context=save)

    class Function(torch.autograd.Function):
        # Without setup_context, which takes the host longer
        @staticmethod
        def forward(ctx, *arguments: object) -> tuple[Tensor, Tensor]:
            save(ctx, arguments, outputs := run_forward(*arguments))
            return outputs

        backward = staticmethod(once_differentiable(functools.partial(gradients, run_backward)))

    def run(*arguments: object) -> Tensor:
        call = attend if torch.compiler.is_compiling() else Function.apply
        if arguments[0].dtype == torch.bfloat16 and arguments[0].device.type == "cpu":
            # Triton's interpreter multiplies bfloat16 as if it were integers.
            return call(*(x.float() if torch.is_tensor(x) else x for x in arguments))[0].bfloat16()
        return call(*arguments)[0]

    return run


def new_map(x: Tensor) -> Tensor:
    """Return an empty tensor for ``x`` (B, M, ..., D) of the same shape, which lies in memory as (B, ..., M, D)."""
    batch, heads, *tokens, channels = x.shape
    return x.new_empty((batch, *tokens, heads, channels)).movedim(-2, 1)


def new_sums(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor for sums, in float32 or better."""
    return query.new_empty(shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


def _logsumexp_shape(query: Tensor) -> tuple[int, ...]:
    batch, heads, height, width, _ = query.shape
    return batch, height, width, heads


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> ModuleType:
    from backbones.attention import triton_kernels

    return triton_kernels


@dataclasses.dataclass(frozen=True)
class Launch:
    """Block sizes and the number of warps of a kernel. Block sizes are powers of two of at least 16.

    Attributes:
        positions: Block size along the positions of a chunk.
        tokens: Block size along the tokens of a window, or along the tokens that attend to a global token.
        channels: D rounded up to a power of two. The channels beyond D are masked.
        num_warps: Number of warps.
        num_stages: Stages of the software pipeline that loads blocks.
    """

    positions: int
    tokens: int
    channels: int
    num_warps: int
    num_stages: int = 2


def launch_parameters(chunk_size: int, channels: int, dtype: torch.dtype) -> Launch:
    """Return block sizes that fit the registers and shared memory of sm_80, sm_90, sm_100 and sm_120.

    In bfloat16, with 49 positions of 32 channels, they are within 5% of the fastest of 16 on an H200. The others were
    chosen by the compiler's reports.
    """
    padded = power_of_two(channels)
    # Larger blocks do not fit in the registers. float32 needs the most, because tensor cores do not multiply it, and
    # masked channels need registers too.
    is_single, is_wide = dtype == torch.float32, padded > 64
    if is_single:
        positions, tokens = 32, 16 if is_wide else 32
    else:
        positions, tokens = 32 if is_wide else 64, 64 if channels == padded <= 32 else 32
    return Launch(
        positions=min(power_of_two(chunk_size**2), positions),
        tokens=tokens,
        channels=padded,
        num_warps=8 if is_single and is_wide else 4,
    )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number`` and 16."""
    return max(16, 1 << (number - 1).bit_length())


def strides_by_name(axes: str, **tensors: Tensor | None) -> dict[str, int]:
    """Return the strides of tensors, 0 for None. ``query_b`` is the stride of ``query`` along b, one of the axes."""
    return {
        f"{name}_{axis}": 0 if x is None else x.stride(i) for name, x in tensors.items() for i, axis in enumerate(axes)
    }


def start_kernel(kernel: Any, grid: tuple[int, int, int], values: dict[str, Any], **compiled: int | bool) -> None:
    """Start the programs of a kernel.

    Args:
        kernel: The kernel.
        grid: Numbers of programs.
        values: Arguments by name, also of other kernels.
        compiled: Options of the compiler.
    """
    if all(grid):
        with torch.cuda.device_of(values["query"]):
            kernel[grid](**{name: values[name] for name in kernel.arg_names}, **compiled)


# With blocks of 32 tokens, these kernels took 0.8 of the time of 64 on an H200.
_SMALL_BLOCKS = ("query_grad_kernel", "key_grad_kernel")


class _KernelLauncher:
    """Launches the kernels for some tensors. A chunk attends to its window, or to itself and the chunk at ``shift``."""

    def __init__(self, *arguments: Tensor | int | str | list[int] | None) -> None:
        *tensors, chunk_size, self.mode, self.shift = arguments
        inputs, shift, self.chunk_size = WindowInputs(*tensors), self.shift, chunk_size
        self.positions = chunk_size**2
        self.side = max(chunk_size // 2, 1) if self.mode == SEGMENT_MODE else chunk_size
        self.seen = (chunk_size + 2 * self.side) ** 2 if shift is None else 2 * self.positions
        self.inputs = inputs = _with_contiguous_globals(inputs)
        self.batch, self.heads, self.height, self.width, self.channels = inputs.query.shape
        self.num_global = 0 if inputs.global_key is None else inputs.global_key.shape[2]
        self.launch = launch_parameters(chunk_size, self.channels, inputs.query.dtype)
        self.chunks = -(-self.height // chunk_size) * -(-self.width // chunk_size)
        self.position_blocks = -(-self.positions // self.launch.positions)
        self.grid = self.chunks * self.position_blocks, self.heads, self.batch
        shift_row, shift_col = shift or (0, 0)
        is_double = inputs.query.dtype == torch.float64
        self.arguments = inputs._asdict() | {
            "local_bias": self._with_pitch(inputs.local_bias),
            "batches": self.batch,
            "height": self.height,
            "width": self.width,
            "shift_row": shift_row,
            "shift_col": shift_col,
            "WINDOW": chunk_size,
            "SIDE": self.side,
            "SEEN": self.seen,
            "PITCH": self._pitch(self.seen),
            "GLOBALS": self.num_global,
            "CHANNELS": self.channels,
            "SCALE": self.channels**-0.5,
            "MODE": self.mode,
            "POSITIONS_BLOCK": self.launch.positions,
            "TOKENS_BLOCK": self.launch.tokens,
            "GLOBALS_BLOCK": _GLOBALS_BLOCK,
            "CHANNELS_BLOCK": self.launch.channels,
            "ACC_DTYPE": _kernels().tl.float64 if is_double else _kernels().tl.float32,
            **strides_by_name("bmhwd", query=inputs.query, key=inputs.key, value=inputs.value),
        }

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, M, H, W, D) and the log-sum-exps to base 2 (B, H, W, M)."""
        query = self.inputs.query
        output, logsumexp = new_map(query), new_sums(query, _logsumexp_shape(query))
        self._start("forward_kernel", self.grid, output=output, lse=logsumexp)
        return output, logsumexp

    def backward(self, grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool]) -> WindowInputs:
        """Return the gradients of the queries and of the other inputs that need one.

        Args:
            grad: Gradient of the output.
            output: The first result of :meth:`forward`.
            logsumexp: The second result of :meth:`forward`.
            needed: Whether each input needs a gradient.
        """
        needed, query_grad = WindowInputs(*needed), new_map(self.inputs.query)
        # delta: the product of the output and its gradient, (B, H, W, M)
        saved = {"grad": grad, "lse": logsumexp, "delta": torch.empty_like(logsumexp)}
        self.arguments |= saved | strides_by_name("bmhwd", grad=grad)
        self._start("query_grad_kernel", self.grid, output=output, query_grad=query_grad)
        gradients = {"query": query_grad, "key": None, "value": None}
        if needed.key or needed.value:
            gradients |= self._key_grads()
        if needed.global_key or needed.global_value or needed.global_bias:
            gradients |= self._global_grads()
        if needed.local_bias:
            gradients |= self._local_bias_grad()
        return WindowInputs(**gradients)

    def _key_grads(self) -> dict[str, Tensor]:
        """Return the gradients of keys and values."""
        key_grad, value_grad = new_map(self.inputs.query), new_map(self.inputs.query)
        bias, shift = self.inputs.local_bias, self.shift or (0, 0)
        mirrored_bias = None if bias is None else self._with_pitch(self._mirrored(bias))
        seen = self.positions * (9 if self.shift is None else 2)
        # The neighbor on the other side attends to a chunk.
        mirrored = {"shift_row": -shift[0], "shift_col": -shift[1], "SEEN": seen, "PITCH": self._pitch(seen)}
        outputs = {"key_grad": key_grad, "value_grad": value_grad}
        self._start("key_grad_kernel", self.grid, mirrored_bias=mirrored_bias, **outputs, **mirrored)
        return {"key": key_grad, "value": value_grad}

    def _local_bias_grad(self) -> dict[str, Tensor]:
        """Return the gradient of the local bias, in float32 or better. Shares of the chunks are summed first."""
        blocks = self.position_blocks * -(-self.seen // self.launch.tokens)
        shares = max(1, min(_SHARES // (blocks * self.heads), self.batch * self.chunks))
        partial = new_sums(self.inputs.query, (shares, self.heads, self.positions, self.seen))
        self._start("local_bias_grad_kernel", (blocks, self.heads, shares), partial=partial)
        return {"local_bias": partial.sum(0)}

    def _global_grads(self) -> dict[str, Tensor | None]:
        """Return the gradients of global keys, values and biases. Shares of the tokens are summed first."""
        blocks = -(-self.num_global // _GLOBALS_BLOCK)
        most = -(-self.height * self.width // self.launch.tokens)
        shares = max(1, min(_SHARES // max(1, blocks * self.heads * self.batch), most))
        shape = shares, self.batch, self.heads, self.num_global
        keys_values = new_sums(self.inputs.query, (2, *shape, self.channels))
        bias = None if self.inputs.global_bias is None else new_sums(self.inputs.query, shape)
        partials = {"key_partial": keys_values[0], "value_partial": keys_values[1], "bias_partial": bias}
        self._start("global_grad_kernel", (shares * blocks, self.heads, self.batch), **partials)
        # A custom operator must not return views of one tensor.
        key, value = (x.sum(0).to(self.inputs.query.dtype) for x in keys_values)
        return {"global_key": key, "global_value": value, "global_bias": None if bias is None else bias.sum((0, 1))}

    def _start(self, name: str, grid: tuple[int, int, int], **arguments: Tensor | int | None) -> None:
        """Start a kernel. Its parameters get :attr:`arguments` and ``arguments`` of the same names."""
        values, launch = self.arguments | arguments, self.launch
        if name in _SMALL_BLOCKS:
            values["TOKENS_BLOCK"] = min(launch.tokens, 32)
        compiled = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
        start_kernel(getattr(_kernels(), name), grid, values, **compiled)

    def _mirrored(self, bias: Tensor) -> Tensor:
        """Return the bias (M, P, 9 * P or 2 * P) of key positions by query slots, from (M, P, S), queries by keys."""
        size, beyond = self.chunk_size, self.chunk_size - self.side
        if self.shift is not None:
            return bias.unflatten(2, (2, -1)).transpose(1, 3).flatten(2)
        # Positions and slots as rows and columns in the chunk, and the steps to the chunk down and to the right
        bias = F.pad(bias.unflatten(2, (3 * size - 2 * beyond, -1)), (beyond,) * 4) if beyond else bias
        bias = bias.flatten(2).unflatten(2, (3, size, 3, size)).unflatten(1, (size, size))
        return bias.flip(3, 5).permute(0, 4, 6, 3, 1, 5, 2).flatten(3).flatten(1, 2)

    def _pitch(self, seen: int) -> int:
        """Return the stride between two positions of a bias: a multiple of the block, so that rows are aligned."""
        return -(-seen // self.launch.tokens) * self.launch.tokens

    def _with_pitch(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias (M, P, S) as (M, P, PITCH), to base 2, in the dtype of queries. Values beyond S are not set."""
        if bias is None:
            return None
        padded = self.inputs.query.new_empty(*bias.shape[:2], self._pitch(bias.shape[2]))
        torch.mul(bias, math.log2(math.e), out=padded[..., : bias.shape[2]])
        return padded


_attend = define_operator(
    "triton_chunks",
    "Tensor query, Tensor key, Tensor value, Tensor? global_key, Tensor? global_value, Tensor? local_bias, "
    "Tensor? global_bias, int chunk_size, str mode, int[]? shift",
    num_tensors=7,
    launcher=_KernelLauncher,
    logsumexp_shape=_logsumexp_shape,
)
