"""PyTorch's attention without cuDNN's kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def pytorch_attention(query: Tensor, key: Tensor, value: Tensor, **options: Tensor | float | bool | None) -> Tensor:
    """Return ``F.scaled_dot_product_attention`` of the arguments, by any kernel but cuDNN's.

    PyTorch may choose cuDNN's kernel on an H100. Our keys are overlapping views, and its backward pass has rules for
    strides that they may break.
    """
    # Dynamo cannot trace the query of the flag. If the caller excludes cuDNN, its other choices stay in force.
    if query.device.type != "cuda" or not (torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()):
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(_BACKENDS):
        return F.scaled_dot_product_attention(query, key, value, **options)
