"""Choose between PyTorch's attention and the Triton kernels, which are checked before their first use."""

import concurrent.futures
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from backbones.attention import reference
from backbones.attention.triton_chunks import (
    SEGMENT_MODE,
    triton_chunk_attention,
    triton_long_short_attention,
    unmet_requirement,
)
from backbones.attention.triton_dense import DENSE_MODE, triton_map_attention
from backbones.errors import ConfigError, package_version
from backbones.layers.tracing import in_autocast_dtype, is_tracing

logger = logging.getLogger(__name__)
# Relative to the largest value
_TOLERANCES = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Compute capabilities and dtypes for which `make gpu` has shown that the kernels are correct and faster, and the oldest
# version of Triton in these runs. docs/performance.md has the times.
MEASURED = {(9, 0): (torch.bfloat16, torch.float16)}
_LEAST_TRITON = (3, 6)


class Case(NamedTuple):
    """The arguments of attention that decide which kernel runs. The size of the feature map is not among them.

    Attributes:
        device: Device of the tensors.
        dtype: Dtype of the queries.
        channels: Channels D of a head.
        num_global: Number of global tokens, and of projected keys in long-short attention.
        biases: The biases that are not None: ``"local_bias"``, ``"global_bias"``, both or neither.
        is_learned: Whether gradients are needed.
        chunk_size: See :func:`.sliding_chunk.sliding_chunk_attention`. 0 for full attention.
        mode: See there. The mode of long-short attention is ``SEGMENT_MODE``, and of full attention ``DENSE_MODE``.
        shift: See there.
    """

    device: torch.device
    dtype: torch.dtype
    channels: int
    num_global: int
    biases: tuple[str, ...]
    is_learned: bool
    chunk_size: int
    mode: str
    shift: tuple[int, int] | None


def resolve_backend(
    backend: str,
    tensors: dict[str, Tensor | None],
    *,
    mode: str,
    chunk_size: int = 0,
    shift: tuple[int, int] | None = None,
) -> str:
    """Return the backend for these tensors: ``"sdpa"``, ``"triton"`` or ``"reference"``.

    ``"auto"`` is ``"triton"`` if it was measured to be faster (:func:`automatic_backend`), and otherwise ``"sdpa"``.
    Traced and exported runs cannot contain a Triton kernel. A kernel with wrong results is not used
    (:func:`choose_kernel`), but compiled runs do not check this.

    Args:
        backend: The backend that the user has chosen.
        tensors: The tensor arguments of the attention function.
        mode: See :class:`Case`.
        chunk_size: See there.
        shift: See there.

    Raises:
        ConfigError: See :func:`choose_kernel`.
    """
    query, is_auto, is_compiling = tensors["query"], backend == "auto", torch.compiler.is_compiling()
    if is_auto and (query.device.type != "cuda" or is_compiling):
        return "sdpa"
    if backend in ("sdpa", "reference"):
        return backend
    dtype = in_autocast_dtype(query)[0].dtype
    if is_tracing() or (is_auto and automatic_backend(query.device, dtype, query.shape[4]) == "sdpa"):
        return "sdpa"
    if is_compiling or not query.numel() or not _can_check(query):
        return "triton"
    given = {name: x for name, x in tensors.items() if x is not None and x.numel()}
    num_global = sum(given[name].shape[2] for name in ("global_key", "projected_key") if name in given)
    if mode == DENSE_MODE:
        num_global = tensors["key"].shape[2] - math.prod(query.shape[2:4])
    biases = tuple(name for name in ("local_bias", "global_bias") if name in given)
    is_learned = torch.is_grad_enabled() and any(x.requires_grad for x in given.values())
    try:
        return choose_kernel(
            Case(query.device, dtype, query.shape[4], num_global, biases, is_learned, chunk_size, mode, shift)
        )
    except ConfigError:
        # In the capture of a CUDA graph, a kernel cannot be checked.
        if is_auto:
            return "sdpa"
        raise


@functools.cache
def automatic_backend(device: torch.device, dtype: torch.dtype, channels: int) -> str:
    """Return the backend of ``"auto"`` on a GPU, from :func:`read_choices`, or from ``MEASURED`` if it has none."""
    if unmet_requirement(device, channels, dtype) is not None:
        return "sdpa"
    chosen = read_choices().get(choice_key(device, dtype))
    if chosen in ("triton", "sdpa"):
        return chosen
    version = tuple(map(int, re.findall(r"\d+", package_version("triton") or "")[:2]))
    if version >= _LEAST_TRITON and dtype in MEASURED.get(torch.cuda.get_device_capability(device), ()):
        return "triton"
    suggest_tuning(device)
    return "sdpa"


@functools.cache
def suggest_tuning(device: torch.device) -> None:
    """Log, once per device, that the Triton kernels could be tried."""
    logger.info(
        "The attention backend is PyTorch's. The Triton kernels may be faster on this GPU (%s). To measure and use the "
        "faster ones, run vil benchmark --tune --models NAME with the --dtype of the run. To use them at once, set "
        "MODEL.TRANSFORMER.ATTENTION_BACKEND triton (in Python attention_backend='triton').",
        device,
    )


def choices_file() -> Path:
    """Return the file in the user's cache folder in which ``vil benchmark --tune`` stores its choices."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vil-detectron2" / "attention.json"
    )


def read_choices() -> dict[str, str]:
    """Return the stored choices: backends by :func:`choice_key`. A damaged file is ignored with a warning."""
    try:
        return dict(json.loads(choices_file().read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, TypeError, ValueError) as error:
        logger.warning("Ignoring '%s': %s. Delete it, and run vil benchmark --tune again.", choices_file(), error)
        return {}


def choice_key(device: torch.device, dtype: torch.dtype) -> str:
    """Return the key of a choice. A choice is for one compute capability, version of Triton and torch, and dtype."""
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    # A build of Triton may be in a package of another name.
    version = package_version("triton") or "unknown"
    return f"capability {capability}, triton {version}, torch {torch.__version__}, {str(dtype)[6:]}"


def _can_check(query: Tensor) -> bool:
    return query.device.type == "cuda" and unmet_requirement(query.device, query.shape[4], query.dtype) is None


@functools.cache
def choose_kernel(case: Case) -> str:
    """Return ``"triton"``, or ``"sdpa"`` if the Triton kernel fails or differs from the reference.

    The first call of a case runs the kernel once on a small feature map and logs the choice. Processes with the same
    devices and libraries make the same choice.

    Raises:
        ConfigError: If the first call is in the capture of a CUDA graph, where the check cannot run.
        RuntimeError: If the kernel leaves the device unusable, or there is no memory for the check.
    """
    if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError("Triton kernels cannot be checked while a CUDA graph is captured. Run the model once before.")
    # A new thread has neither the caller's autocast state nor its saved-tensor hooks.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        reason = thread.submit(_reason_against_triton, case).result()
    chosen = "triton" if reason is None else "sdpa"
    described = ", ".join(f"{name} {value}" for name, value in case._asdict().items())
    suffix = "" if reason is None else f", because the Triton kernel {reason}"
    logger.log(logging.INFO if reason is None else logging.WARNING, "attention (%s): %s%s", described, chosen, suffix)
    return chosen


def _inputs(case: Case) -> dict[str, Tensor]:
    """Return random inputs for two images: 2 x 3 chunks and one more row and column of tokens, or 9 x 17 tokens."""
    heads, size = (2, 2), case.chunk_size
    if case.mode == DENSE_MODE:
        height, width = 9, 17
        shapes = dict.fromkeys(("query", "key", "value"), (*heads, case.num_global + height * width, case.channels))
        shapes["query"] = (*heads, height, width, case.channels)
        local_bias = (2, 2 * height - 1, 2 * width - 1)
    else:
        shapes = dict.fromkeys(("query", "key", "value"), (*heads, 2 * size + 1, 3 * size + 1, case.channels))
        shared, side = ("projected", max(size // 2, 1)) if case.mode == SEGMENT_MODE else ("global", size)
        if case.num_global:
            shapes |= dict.fromkeys((f"{shared}_key", f"{shared}_value"), (*heads, case.num_global, case.channels))
        local_bias = (2, size**2, (size + 2 * side) ** 2)
    bias_shapes = {"local_bias": local_bias, "global_bias": (2, case.num_global)}
    shapes |= {name: bias_shapes[name] for name in case.biases}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}


def _reason_against_triton(case: Case) -> str | None:
    inputs, options = _inputs(case), {"chunk_size": case.chunk_size, "mode": case.mode, "shift": case.shift}
    by_reference, by_triton = reference.sliding_chunk_attention, triton_chunk_attention
    if case.mode == SEGMENT_MODE:
        by_reference, by_triton = reference.long_short_attention, triton_long_short_attention
        options = {"chunk_size": case.chunk_size}
    elif case.mode == DENSE_MODE:
        by_reference, by_triton, options = reference.map_attention, triton_map_attention, {}
    in_double = {name: x.double() for name, x in inputs.items()}
    expected = _outputs_and_gradients(by_reference, in_double, case.is_learned, options)
    try:
        on_device = {name: x.to(case.device) for name, x in inputs.items()}
        actual = _outputs_and_gradients(by_triton, on_device, case.is_learned, options)
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # A broken installation, the compiler, the assembler and the driver raise many types of errors.
        try:
            torch.get_device_module(case.device).synchronize(case.device)
        except RuntimeError:
            # The device is unusable, so PyTorch's attention would fail too.
            raise error from None
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"
    pairs = zip(actual, expected, strict=True)
    errors = [((x.cpu().double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]
    # NaN is never within the tolerance.
    if all(error <= _TOLERANCES[case.dtype] for error in errors):
        return None
    return f"differs from the reference by {max(errors):.1e} of the largest value"


def _outputs_and_gradients(
    function: Callable[..., Tensor], inputs: dict[str, Tensor], is_learned: bool, options: dict
) -> list[Tensor]:
    inputs = {name: x.detach().requires_grad_(is_learned) for name, x in inputs.items()}
    output = function(**inputs, **options)
    if not is_learned:
        return [output]
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype).view(output.shape)
    # On the thread of the device, this backward pass would wait for the caller's own backward pass.
    with torch.autograd.set_multithreading_enabled(False):
        return [output.detach(), *torch.autograd.grad(output, list(inputs.values()), weights)]
