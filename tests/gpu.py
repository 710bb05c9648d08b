"""Tests of what needs a GPU; ``GPU_TESTS_DEVICE=cpu make test ARGS="-m gpu"`` tries the tests themselves on a CPU."""

import os
from collections.abc import Callable

import pytest
import torch

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def on_gpu(test: Callable, *, devices: int = 1) -> Callable:
    """Mark a test, and skip it where there are fewer GPUs."""
    missing = DEVICE == "cuda" and torch.cuda.device_count() < devices
    reason = "needs a CUDA device" if devices == 1 else f"needs {devices} CUDA devices"
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason=reason)(test))
