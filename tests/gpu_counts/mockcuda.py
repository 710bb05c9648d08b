"""Count the GPU work of a block of code: kernel launches, and the lines at which the host waits.

Imported in a process of the fixture ``run_on_mock``. Values on ``cuda:0`` are zeros: what sorts or asserts gets answers
from here, and a Mask R-CNN has almost no proposals.
"""

import collections
import ctypes
import functools
import os
import sys
import traceback
from pathlib import Path

import torch

from backbones.attention import triton_check, triton_dense_kernels, triton_kernels

REPO = f"{Path(__file__).parents[2]}{os.sep}"
LIBRARY = ctypes.CDLL(os.environ["MOCK_CUDA"])
LIBRARY.mock_launches.restype = ctypes.c_long
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
# In the thread of the caller, so that waits of backward passes have lines.
torch.autograd.set_multithreading_enabled(False)
# Triton would need the driver to compile them.
for _name, _kernel in [*vars(triton_kernels).items(), *vars(triton_dense_kernels).items()]:
    if _name.endswith("_kernel"):
        _kernel.run = lambda *args, **options: LIBRARY.mock_launch()
# Kernels that compute nothing would fail their check.
triton_check.choose_kernel = lambda case: "triton"


class Count:
    """Context manager that counts ``launches`` of kernels and matrix products, and ``waits`` by ``file:line``."""

    def __init__(self) -> None:
        self.launches, self.waits = 0, collections.Counter()
        self._callback = ctypes.CFUNCTYPE(None)(self._note_wait)

    def __enter__(self) -> "Count":
        LIBRARY.mock_on_wait(self._callback)
        self.launches = LIBRARY.mock_launches()
        return self

    def __exit__(self, *error: object) -> None:
        self.launches = LIBRARY.mock_launches() - self.launches
        LIBRARY.mock_on_wait(None)

    def _note_wait(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        places = [f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" for frame in frames]
        known = [place for place in places if place.startswith((REPO, "detectron2/"))]
        self.waits[(known or places)[-1].removeprefix(REPO)] += 1


def _on_cuda(owner: object, name: str):
    """Replace a function for tensors on the GPU by the decorated one, which gets the original as its first argument."""

    def decorate(replacement):
        original = getattr(owner, name)

        @functools.wraps(original)
        def function(x, *args, **options):
            return replacement(original, x, *args, **options) if x.is_cuda else original(x, *args, **options)

        setattr(owner, name, function)
        return replacement

    return decorate


@_on_cuda(torch.Tensor, "prod")
def _prod(original, x, *args, **options):
    # PyTorch compiles this operator at its first call. The mock has no compiler, so amin replaces it: also one kernel.
    return x.amin(*args, **options)


@_on_cuda(torch.Tensor, "__bool__")
@_on_cuda(torch.Tensor, "item")
def _true_for_detectron2(original, x):
    """Skip the assertions of detectron2."""
    value = original(x)
    return value or "detectron2" in sys._getframe(2).f_code.co_filename if x.dtype == torch.bool else value


@_on_cuda(torch, "topk")
@_on_cuda(torch.Tensor, "topk")
def _topk(original, x, k, dim=-1, **options):
    values = x.narrow(dim, 0, k).clone()
    return values, torch.zeros_like(values, dtype=torch.int64)


@_on_cuda(torch, "sort")
@_on_cuda(torch.Tensor, "sort")
def _sort(original, x, *args, **options):
    return x.clone(), torch.zeros_like(x, dtype=torch.int64)


@_on_cuda(torch, "argsort")
def _argsort(original, x, *args, **options):
    return torch.zeros_like(x, dtype=torch.int64)


@_on_cuda(torch, "repeat_interleave")
def _repeat_interleave(original, x, repeats):
    # The sizes are copied from the host, but not their sum, which a kernel would compute.
    return torch.zeros(int(repeats.cpu().sum()), dtype=x.dtype, device=x.device)
