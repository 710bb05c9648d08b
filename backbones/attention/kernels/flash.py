"""PyTorch's attention with what its own kernels keep beside the output: the one place that calls private operators."""

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.execution.tracing import is_tracing

# Outputs and log-sum-exps, on the CPU. Private: where a version of torch lacks it or changes it, nothing calls it.
_CPU_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Scores of a block of our own backward passes: on a CPU one that stays in the cache, on others one that keeps the
# device busy.
BLOCK_SCORES = {"cpu": 2**20, "other": 2**25}
# There, lower exponents are taken for this one: the weight is nothing beside 1, and exponentials below the least normal
# number take ten times as long, and more.
LEAST_EXPONENT = -60.0


def learns_by_blocks(*tensors: Tensor | None, biases: tuple[Tensor | None, ...] = ()) -> bool:
    """Whether this run needs gradients that our own backward passes give; a recorded or compiled one takes PyTorch's.

    Of no image there is nothing to compute, and PyTorch's gradients are as good. So they are, but on a CPU, where no
    bias is learned: a GPU's fused kernels keep no scores then either.

    Args:
        tensors: queries, keys and values.
        biases: added to scores.
    """
    if not torch.is_grad_enabled() or is_tracing() or torch.compiler.is_compiling():
        return False
    learned = any(bias is not None and bias.requires_grad for bias in biases)
    if tensors[0].device.type != "cpu" and not learned:
        return False
    given = [x for x in (*tensors, *biases) if x is not None]
    return any(x.requires_grad for x in given) and all(x.numel() for x in given)


def attention_and_sums(
    query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention outside of autograd.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D), of the type of ``query``.
        bias: broadcast to (B, M, L, S), four axes, or None.
        scale: of the products.

    Returns:
        The output (B, M, L, D), and the logarithm of the sum of exponentials of each query's scores, (B, M, L), of
        float32 or better; None where this version of torch or this device does not give it.
    """
    if query.device.type == "cpu" and _CPU_KERNEL is not None:
        # The kernel reads the channels of a token as neighbours, and does not look whether they are.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        try:
            output, sums = _CPU_KERNEL(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            # The way round takes more memory.
            if "allocate memory" in str(error):
                raise
        else:
            return output, sums
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale), None


def in_autocast_type(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as PyTorch's attention would take them: autocast chooses its type for all but float64."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)
