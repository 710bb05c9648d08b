"""Marks of GPU tests. ``GPU_TESTS_DEVICE=cpu make test ARGS="-m gpu"`` runs these tests on a CPU."""

import os
from collections.abc import Callable

import pytest
import torch

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def on_gpu(test: Callable) -> Callable:
    """Mark a test as a GPU test, and skip it without a GPU."""
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a CUDA device")(test))


def on_gpus(number: int) -> Callable[[Callable], Callable]:
    """Mark a test that cannot run on a CPU, and skip it if there are fewer GPUs."""
    missing = pytest.mark.skipif(torch.cuda.device_count() < number, reason=f"needs {number} CUDA devices")
    return lambda test: pytest.mark.gpu(missing(test))
