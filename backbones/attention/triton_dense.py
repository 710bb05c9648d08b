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

from backbones.attention import triton_chunks
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
        local_bias: (M or 1, 2 * H - 1, 2 * W - 1), the bias by offset of rows and of columns, query minus key.
        global_bias: (M or 1, G), or None for no bias of the global tokens.

    Returns:
        (B, M, H * W, D), which lies in memory as (B, H * W, M, D).

    Raises:
        ConfigError: If D is larger, the device cannot run Triton, or the dtype is float64 on a GPU.
    """
    biases = (None if x is None else x.expand(query.shape[1], *x.shape[1:]) for x in (local_bias, global_bias))
    return _attend(*in_autocast_dtype(query.flatten(2, 3), key, value), *biases)


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
        table = triton_chunks.new_sums(query, (self.heads, length))
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
            "CHANNELS_BLOCK": triton_chunks.power_of_two(channels),
            "ACC_DTYPE": kernels.tl.float64 if table.dtype == torch.float64 else kernels.tl.float32,
            **triton_chunks.strides_by_name("bmnd", query=query, key=key, value=value),
        }
        biases = {"offset_bias": local_bias, "global_bias": global_bias, "BLOCK": _TABLE_BLOCK}
        strides = triton_chunks.strides_by_name("mhw", offset_bias=local_bias)
        strides |= triton_chunks.strides_by_name("mg", global_bias=global_bias)
        self._start("table_kernel", (-(-length // _TABLE_BLOCK), self.heads, 1), **biases, **strides)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, M, N, D) and the log-sum-exps to base 2 (B, M, N)."""
        output, logsumexp = triton_chunks.new_map(self.query), triton_chunks.new_sums(self.query, self.query.shape[:3])
        launch = self._launch("forward_kernel")
        grid = -(-self.tokens // launch.queries), self.heads, self.batch
        self._start("forward_kernel", grid, launch, output=output, lse=logsumexp)
        return output, logsumexp

    def backward(
        self, grad: Tensor, output: Tensor, logsumexp: Tensor, needed: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the queries and of the other inputs that need one."""
        _, needs_key, needs_value, needs_local_bias, needs_global_bias = needed
        saved = {"grad": grad, "lse": logsumexp, "delta": torch.empty_like(logsumexp)}
        self.arguments |= saved | triton_chunks.strides_by_name("bmnd", grad=grad)
        launch = self._launch("query_grad_kernel")
        blocks = -(-self.tokens // launch.queries)
        query_grad, partial = triton_chunks.new_map(self.query), None
        if needs_global_bias:
            partial = triton_chunks.new_sums(self.query, (blocks, self.batch, self.heads, self.num_global))
        outputs = {"query_grad": query_grad, "global_bias_partial": partial}
        self._start("query_grad_kernel", (blocks, self.heads, self.batch), launch, output=output, **outputs)
        key_grad = value_grad = local_bias_grad = None
        if needs_key or needs_value:
            key_grad, value_grad = (triton_chunks.new_map(self.arguments["key"]) for _ in range(2))
            launch = self._launch("key_grad_kernel")
            blocks = -(-self.tokens // launch.keys) + -(-self.num_global // launch.keys)
            outputs = {"key_grad": key_grad, "value_grad": value_grad}
            self._start("key_grad_kernel", (blocks, self.heads, self.batch), launch, **outputs)
        if needs_local_bias:
            local_bias_grad = self._local_bias_grad()
        return query_grad, key_grad, value_grad, local_bias_grad, None if partial is None else partial.sum((0, 1))

    def _local_bias_grad(self) -> Tensor:
        """Return the gradient of the bias by offset, in float32 or better."""
        launch = self._launch("pair_grad_kernel")
        height, width = self.height, self.width
        rows = rows_per_group(height, width, launch.queries)
        keys = ((-(-height // rows) - 1) * rows + height) * width
        blocks = -(-rows * width // launch.queries) * -(-keys // launch.keys)
        shares = max(1, min(_PROGRAMS // (blocks * self.heads), self.batch))
        partial = triton_chunks.new_sums(self.query, (shares, self.heads, rows * width, keys))
        grid = blocks, self.heads, shares
        self._start("pair_grad_kernel", grid, launch, partial=partial, rows=rows)
        gradient = triton_chunks.new_sums(self.query, (self.heads, 2 * height - 1, 2 * width - 1))
        grid = -(-(2 * width - 1) // _OFFSETS_BLOCK), 2 * height - 1, self.heads
        options = {"QUERIES_BLOCK": _PAIRS_BLOCK, "OFFSETS_BLOCK": _OFFSETS_BLOCK, "rows": rows, "shares": shares}
        self._start("offset_grad_kernel", grid, partial=partial, offset_bias_grad=gradient, **options)
        return gradient

    def _launch(self, kernel: str) -> Launch:
        return launch_parameters(kernel, self.query.shape[3], self.query.dtype)

    def _start(
        self, name: str, grid: tuple[int, int, int], launch: Launch | None = None, **arguments: Tensor | int | None
    ) -> None:
        """Start a kernel. Its parameters get :attr:`arguments` and ``arguments`` of the same names."""
        values, compiled = self.arguments | arguments, {}
        if launch is not None:
            values = {"QUERIES_BLOCK": launch.queries, "KEYS_BLOCK": launch.keys} | values
            compiled = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        triton_chunks.start_kernel(getattr(_kernels(), name), grid, values, **compiled)


_attend = triton_chunks.define_operator(
    "triton_dense",
    "Tensor query, Tensor key, Tensor value, Tensor local_bias, Tensor? global_bias",
    num_tensors=5,
    launcher=_KernelLauncher,
    logsumexp_shape=lambda query: query.shape[:3],
)
