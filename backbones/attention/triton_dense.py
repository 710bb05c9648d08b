"""Launch the Triton kernels for attention of a feature map to all its tokens, with a learned bias, on CUDA.

Neither scores nor the bias of all pairs are in memory. The forward pass keeps outputs and log-sum-exps, and the
backward pass computes the scores again. Results do not vary from run to run. :mod:`.triton_dense_kernels` has the
kernels. It is imported at their first use, because triton may not be installed.

Shapes: B images, M heads, N = H * W tokens, D channels per head, G global tokens.
"""

import dataclasses
from types import ModuleType

import torch
from torch import Tensor

from backbones.attention.triton_chunks import check_requirement, power_of_two
from backbones.layers.tracing import in_autocast_dtype

# The mode of this attention in :mod:`.triton_check`
DENSE_MODE = "dense"
# Programs that sum the gradients of pairs of tokens: enough for the largest devices, and the same on all devices
_PROGRAMS = 1024
# Block size along the global tokens
_GLOBALS_BLOCK = 16
# Block sizes of the kernels without products
_TABLE_BLOCK, _OFFSETS_BLOCK, _PAIRS_BLOCK = 1024, 64, 32


def triton_map_attention(
    query: Tensor, key: Tensor, value: Tensor, local_bias: Tensor, global_bias: Tensor | None = None
) -> Tensor:
    """Return the result of :func:`.dense.map_attention`, for heads of at most 128 channels.

    Tensors may have any strides. Sums and the bias are float32, or float64 for float64 inputs, which only the
    interpreter supports. Products of float32 are not rounded to TensorFloat-32. Gradients cannot be differentiated
    again. The forward and the backward pass are one operator each, so that ``torch.compile`` does not trace the
    kernels.

    Args:
        query: (B, M, H, W, D).
        key: (B, M, G + H * W, D).
        value: (B, M, G + H * W, D).
        local_bias: (M, 2 * H - 1, 2 * W - 1), the bias by offset of rows and of columns, query minus key.
        global_bias: (M, G), or None for no bias of the global tokens.

    Returns:
        (B, M, H * W, D), which lies in memory as (B, H * W, M, D).

    Raises:
        ConfigError: If D is larger, the device cannot run Triton, or the dtype is float64 on a GPU.
    """
    query, key, value = in_autocast_dtype(query.flatten(2, 3), key, value)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # Triton's interpreter multiplies bfloat16 as if it were integers.
        query, key, value = query.float(), key.float(), value.float()
        return _attend(query, key, value, local_bias, global_bias)[0].bfloat16()
    return _attend(query, key, value, local_bias, global_bias)[0]


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor local_bias, Tensor? global_bias"


@torch.library.custom_op("backbones::triton_dense", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
def _attend(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exps to base 2 (B, M, N) that the backward pass needs."""
    query = inputs[0]
    check_requirement(query)
    output, logsumexp = _new_tokens(query), _new_sums(query, query.shape[:3])
    _KernelLauncher(*inputs).forward(output, logsumexp)
    return output, logsumexp


@torch.library.custom_op(
    "backbones::triton_dense_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor logsumexp, bool[] needed, {_INPUTS}) -> Tensor[]",
)
def _attend_backward(
    grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool], *inputs: Tensor | None
) -> list[Tensor]:
    """Return the gradients of the inputs that need one, in their dtypes."""
    gradients = _KernelLauncher(*inputs).backward(grad, output, logsumexp, *needed)
    return [x.to(y.dtype) for x, y, is_needed in zip(gradients, inputs, needed, strict=True) if is_needed]


@_attend.register_fake
def _(query: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    return _new_tokens(query), _new_sums(query, query.shape[:3])


@_attend_backward.register_fake
def _(grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool], *inputs: Tensor | None) -> list[Tensor]:
    given = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    return [_new_tokens(x) if x.dim() == 4 else x.new_empty(x.shape) for x in given]


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, output, logsumexp = ctx.saved_tensors
    needed = ctx.needs_input_grad
    gradients = iter(_attend_backward(grad, output, logsumexp, list(needed), *inputs))
    return tuple(next(gradients) if is_needed else None for is_needed in needed)


_attend.register_autograd(_gradients, setup_context=_save)


def _new_tokens(x: Tensor) -> Tensor:
    """Return an empty tensor (B, M, L, D) for ``x`` of the same shape, which lies in memory as (B, L, M, D)."""
    batch, heads, length, channels = x.shape
    return x.new_empty((batch, length, heads, channels)).transpose(1, 2)


def _new_sums(query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor for sums, in float32 or better."""
    return query.new_empty(shape, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


def _kernels() -> ModuleType:
    from backbones.attention import triton_dense_kernels

    return triton_dense_kernels


@dataclasses.dataclass(frozen=True)
class Launch:
    """Block sizes along queries and keys, powers of two of at least 16, and the compiler's options of a kernel."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int = 2
    maxnreg: int | None = None


def launch_parameters(kernel: str, channels: int, dtype: torch.dtype) -> Launch:
    """Return the parameters of a kernel that fit the registers and shared memory of sm_80, sm_90, sm_100 and sm_120.

    For bfloat16 and up to 64 channels, forward, query and key kernels were the fastest of a sweep on an H200 with 50 x
    84 tokens: one pipeline stage took 0.6 to 0.8 of the time of two. The others were chosen by the compiler's reports.

    Args:
        kernel: Name of the kernel.
        channels: Channels D of a head.
        dtype: Dtype of the queries.
    """
    if dtype.itemsize > 2:
        # Tensor cores do not multiply float32, so it needs the most registers.
        return Launch(32, 16 if channels > 64 else 32, 8 if channels > 64 else 4)
    if channels <= 64:
        is_pair = kernel == "pair_grad_kernel"
        return Launch(64, 32 if is_pair and channels > 32 else 64, 4, 2 if is_pair else 1)
    # The program of a kernel keeps one block, and iterates over blocks of the other kind.
    if kernel == "key_grad_kernel":
        return Launch(32, 32, 4)
    return Launch(32 if kernel == "pair_grad_kernel" else 64, 32, 4)


def rows_per_group(height: int, width: int, block: int) -> int:
    """Return the rows of a group, for few unused queries in the blocks and little memory for the sums of pairs."""
    return min(
        range(1, min(height, 4) + 1), key=lambda rows: -(-rows * width // block) * block / (rows * width) + rows / 20
    )


class _KernelLauncher:
    """Launches the kernels for some inputs."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, local_bias: Tensor, global_bias: Tensor | None
    ) -> None:
        self.query = query
        self.batch, self.heads, self.tokens, channels = query.shape
        self.height, self.width = ((size + 1) // 2 for size in local_bias.shape[1:])
        self.num_global = key.shape[2] - self.tokens
        first = (self.height - 1) * local_bias.shape[2] + self.width
        length = first + local_bias[0].numel() + self.num_global
        table = _new_sums(query, (self.heads, length))
        kernels = _kernels()
        self.arguments = {
            "query": query,
            "key": key,
            "value": value,
            "table": table,
            "places": query.new_empty(self.tokens, dtype=torch.int32),
            "batches": self.batch,
            "height": self.height,
            "width": self.width,
            "GLOBALS": self.num_global,
            "CHANNELS": channels,
            "SCALE": channels**-0.5,
            "GLOBALS_BLOCK": _GLOBALS_BLOCK,
            "CHANNELS_BLOCK": power_of_two(channels),
            "ACC_DTYPE": kernels.tl.float64 if table.dtype == torch.float64 else kernels.tl.float32,
        }
        biases = {"offset_bias": local_bias, "global_bias": global_bias, "BLOCK": _TABLE_BLOCK}
        self._start("table_kernel", (-(-length // _TABLE_BLOCK), self.heads, 1), **biases)

    def forward(self, output: Tensor, logsumexp: Tensor) -> None:
        """Compute the output (B, M, N, D) and the log-sum-exps (B, M, N)."""
        launch = self._launch("forward_kernel")
        grid = -(-self.tokens // launch.queries), self.heads, self.batch
        self._start("forward_kernel", grid, launch, output=output, lse=logsumexp)

    def backward(
        self,
        grad: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        needs_query: bool,
        needs_key: bool,
        needs_value: bool,
        needs_local_bias: bool,
        needs_global_bias: bool,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the queries and of the other inputs that need one."""
        key, known = self.arguments["key"], {"grad": grad, "lse": logsumexp, "delta": torch.empty_like(logsumexp)}
        launch = self._launch("query_grad_kernel")
        blocks = -(-self.tokens // launch.queries)
        query_grad, partial = _new_tokens(self.query), None
        if needs_global_bias:
            partial = _new_sums(self.query, (blocks, self.batch, self.heads, self.num_global))
        outputs = {"query_grad": query_grad, "global_bias_partial": partial}
        self._start("query_grad_kernel", (blocks, self.heads, self.batch), launch, output=output, **outputs, **known)
        key_grad = value_grad = local_bias_grad = None
        if needs_key or needs_value:
            key_grad, value_grad = _new_tokens(key), _new_tokens(key)
            launch = self._launch("key_grad_kernel")
            blocks = -(-self.tokens // launch.keys) + -(-self.num_global // launch.keys)
            outputs = {"key_grad": key_grad, "value_grad": value_grad}
            self._start("key_grad_kernel", (blocks, self.heads, self.batch), launch, **outputs, **known)
        if needs_local_bias:
            local_bias_grad = self._local_bias_grad(**known)
        return query_grad, key_grad, value_grad, local_bias_grad, None if partial is None else partial.sum((0, 1))

    def _local_bias_grad(self, **tensors: Tensor) -> Tensor:
        """Return the gradient of the bias by offset, in float32 or better."""
        launch = self._launch("pair_grad_kernel")
        height, width = self.height, self.width
        rows = rows_per_group(height, width, launch.queries)
        keys = ((-(-height // rows) - 1) * rows + height) * width
        blocks = -(-rows * width // launch.queries) * -(-keys // launch.keys)
        shares = max(1, min(_PROGRAMS // (blocks * self.heads), self.batch))
        partial = _new_sums(self.query, (shares, self.heads, rows * width, keys))
        grid = blocks, self.heads, shares
        self._start("pair_grad_kernel", grid, launch, partial=partial, rows=rows, **tensors)
        gradient = _new_sums(self.query, (self.heads, 2 * height - 1, 2 * width - 1))
        grid = -(-(2 * width - 1) // _OFFSETS_BLOCK), 2 * height - 1, self.heads
        options = {"QUERIES_BLOCK": _PAIRS_BLOCK, "OFFSETS_BLOCK": _OFFSETS_BLOCK, "rows": rows, "shares": shares}
        self._start("offset_grad_kernel", grid, partial=partial, offset_bias_grad=gradient, **options)
        return gradient

    def _launch(self, kernel: str) -> Launch:
        return launch_parameters(kernel, self.query.shape[3], self.query.dtype)

    def _start(
        self, name: str, grid: tuple[int, int, int], launch: Launch | None = None, **arguments: Tensor | int | None
    ) -> None:
        """Start a kernel. Its parameters get the arguments of the same names, and strides, such as ``query_b``."""
        if not all(grid):
            return
        values, compiled = self.arguments | arguments, {}
        if launch is not None:
            values = {"QUERIES_BLOCK": launch.queries, "KEYS_BLOCK": launch.keys} | values
            compiled = {name: getattr(launch, name) for name in ("num_warps", "num_stages", "maxnreg")}
        for tensor, axes in _AXES.items():
            strides = [0] * len(axes) if values.get(tensor) is None else values[tensor].stride()
            values |= {f"{tensor}_{axis}": n for axis, n in zip(axes, strides, strict=True)}
        kernel = getattr(_kernels(), name)
        values = {argument: values[argument] for argument in kernel.arg_names}
        with torch.cuda.device_of(self.query):
            kernel[grid](**values, **compiled)


# Names of the strides that the kernels get
_AXES = dict.fromkeys(("query", "key", "value", "grad"), "bmnd") | {"offset_bias": "mhw", "global_bias": "mg"}
