"""Choose between PyTorch's attention and the Triton kernels, which are checked before their first use."""

import concurrent.futures
import functools
import importlib.metadata
import logging
import math
import re
from collections.abc import Callable

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
from backbones.errors import ConfigError
from backbones.layers.tracing import in_autocast_dtype, is_tracing

logger = logging.getLogger(__name__)
# Relative to the largest value
_TOLERANCES = {torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# Compute capabilities and dtypes for which `make gpu` has shown that the kernels are right and faster, and the oldest
# version of Triton in these runs. docs/performance.md has the times.
MEASURED = {(9, 0): (torch.bfloat16, torch.float16)}
_LEAST_TRITON = (3, 6)


def resolve_backend(
    backend: str,
    tensors: dict[str, Tensor | None],
    *,
    mode: str,
    chunk_size: int = 0,
    shift: tuple[int, int] | None = None,
) -> str:
    """Return the backend for these tensors: ``"sdpa"``, ``"triton"`` or ``"reference"``.

    ``"auto"`` is ``"triton"`` for the GPUs and dtypes in ``MEASURED``, and otherwise ``"sdpa"``. Traced and exported
    runs cannot contain a Triton kernel, and a kernel is not used if it is wrong: see :func:`choose_kernel`.

    Args:
        backend: The backend that the user has chosen.
        tensors: The tensor arguments of the attention function.
        mode: See :func:`choose_kernel`.
        chunk_size: See there.
        shift: See there.
    """
    is_auto = backend == "auto"
    if is_auto:
        backend = "triton" if _is_measured(tensors["query"]) else "sdpa"
    if backend != "triton":
        return backend
    try:
        is_usable = not is_tracing() and triton_is_right(tensors, mode=mode, chunk_size=chunk_size, shift=shift)
    except ConfigError:
        # In the capture of a CUDA graph, a kernel cannot be checked.
        if not is_auto:
            raise
        is_usable = False
    return "triton" if is_usable else "sdpa"


def _is_measured(query: Tensor) -> bool:
    if query.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    if in_autocast_dtype(query)[0].dtype in _measured_dtypes(query.device):
        return unmet_requirement(query.device, query.shape[4]) is None
    suggest_triton(query.device)
    return False


@functools.cache
def _measured_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    if unmet_requirement(device) is not None:
        return ()
    try:
        version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        # A build of Triton in a package of another name
        version = None
    if version is None or tuple(map(int, version.groups())) < _LEAST_TRITON:
        return ()
    return MEASURED.get(torch.cuda.get_device_capability(device), ())


@functools.cache
def suggest_triton(device: torch.device) -> None:
    """Log, once per device, that the Triton kernels could be tried if this GPU can run them."""
    if unmet_requirement(device) is None:
        logger.info(
            "The attention backend is PyTorch's. The Triton kernels may be faster on this GPU. To try them, set "
            "MODEL.TRANSFORMER.ATTENTION_BACKEND triton (in Python attention_backend='triton')."
        )


def triton_is_right(
    tensors: dict[str, Tensor | None], *, mode: str, chunk_size: int = 0, shift: tuple[int, int] | None = None
) -> bool:
    """Return whether the Triton kernel may be used for these tensors. See :func:`choose_kernel`.

    The kernel is not checked in a compiled run, nor if it raises a :class:`ConfigError` in any case.
    """
    query = tensors["query"]
    if torch.compiler.is_compiling() or not query.numel() or not _can_check(query):
        return True
    given = {name: x for name, x in tensors.items() if x is not None and x.numel()}
    num_global = sum(given[name].shape[2] for name in ("global_key", "projected_key") if name in given)
    if mode == DENSE_MODE:
        num_global = tensors["key"].shape[2] - math.prod(query.shape[2:4])
    chosen = choose_kernel(
        query.device,
        in_autocast_dtype(query)[0].dtype,
        query.shape[4],
        num_global,
        tuple(name for name in ("local_bias", "global_bias") if name in given),
        torch.is_grad_enabled() and any(x.requires_grad for x in given.values()),
        chunk_size=chunk_size,
        mode=mode,
        shift=shift,
    )
    return chosen == "triton"


def _can_check(query: Tensor) -> bool:
    return query.device.type == "cuda" and unmet_requirement(query.device, query.shape[4], query.dtype) is None


@functools.cache
def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    channels: int,
    num_global: int,
    biases: tuple[str, ...],
    is_learned: bool,
    *,
    chunk_size: int,
    mode: str,
    shift: tuple[int, int] | None,
) -> str:
    """Return ``"triton"``, or ``"sdpa"`` if the Triton kernel fails or differs from the reference.

    The first call with these arguments runs the kernel once on a small feature map and logs the choice. The choice does
    not depend on the image size. Processes with the same devices and libraries make the same choice.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the queries.
        channels: Channels D of a head.
        num_global: Number of global tokens, and of projected keys in long-short attention.
        biases: The given ones of ``"local_bias"`` and ``"global_bias"``.
        is_learned: Whether gradients are needed.
        chunk_size: See :func:`.sliding_chunk.sliding_chunk_attention`. 0 for full attention.
        mode: See there. The mode of long-short attention is ``SEGMENT_MODE``, and of full attention ``DENSE_MODE``.
        shift: See there.

    Raises:
        ConfigError: If the first call is in the capture of a CUDA graph, where the check cannot run.
        RuntimeError: If the kernel leaves the device unusable, or there is no memory for the check.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "The Triton kernel cannot be checked in the capture of a CUDA graph. Run the model once before the capture."
        )
    options = {"chunk_size": chunk_size, "mode": mode, "shift": shift}

    def reason_against_triton() -> str | None:
        inputs = _inputs(dtype, channels, num_global, biases, chunk_size, mode)
        return _reason_against_triton(inputs, device, is_learned, options)

    # A new thread has neither the caller's autocast state nor its saved-tensor hooks.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        reason = thread.submit(reason_against_triton).result()
    chosen = "triton" if reason is None else "sdpa"
    logger.log(
        logging.INFO if reason is None else logging.WARNING,
        "attention of %d channels a head, %d global tokens, %s, %s, %s on %s: %s%s",
        channels,
        num_global,
        ", ".join(f"{name} {value}" for name, value in options.items()),
        "training" if is_learned else "inference",
        str(dtype)[6:],
        device,
        chosen,
        "" if reason is None else f", because the Triton kernel {reason}",
    )
    return chosen


def _inputs(
    dtype: torch.dtype, channels: int, num_global: int, biases: tuple[str, ...], size: int, mode: str
) -> dict[str, Tensor]:
    """Return random inputs for two images: 2 x 3 chunks and one more row and column of tokens, or 9 x 17 tokens."""
    heads = (2, 2)
    if mode == DENSE_MODE:
        height, width = 9, 17
        shapes = dict.fromkeys(("query", "key", "value"), (*heads, num_global + height * width, channels))
        shapes["query"] = (*heads, height, width, channels)
        local_bias = (2, 2 * height - 1, 2 * width - 1)
    else:
        shapes = dict.fromkeys(("query", "key", "value"), (*heads, 2 * size + 1, 3 * size + 1, channels))
        shared, side = ("projected", max(size // 2, 1)) if mode == SEGMENT_MODE else ("global", size)
        if num_global:
            shapes |= dict.fromkeys((f"{shared}_key", f"{shared}_value"), (*heads, num_global, channels))
        local_bias = (2, size**2, (size + 2 * side) ** 2)
    bias_shapes = {"local_bias": local_bias, "global_bias": (2, num_global)}
    shapes |= {name: bias_shapes[name] for name in biases}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def _reason_against_triton(
    inputs: dict[str, Tensor], device: torch.device, is_learned: bool, options: dict[str, object]
) -> str | None:
    by_reference, by_triton = reference.sliding_chunk_attention, triton_chunk_attention
    if options["mode"] == SEGMENT_MODE:
        by_reference, by_triton = reference.long_short_attention, triton_long_short_attention
        options = {"chunk_size": options["chunk_size"]}
    elif options["mode"] == DENSE_MODE:
        by_reference, by_triton, options = reference.map_attention, triton_map_attention, {}
    expected = _outputs_and_gradients(
        by_reference, {name: x.double() for name, x in inputs.items()}, is_learned, options
    )
    try:
        actual = _outputs_and_gradients(
            by_triton, {name: x.to(device) for name, x in inputs.items()}, is_learned, options
        )
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # A broken installation, the compiler, the assembler and the driver raise many types of errors.
        try:
            torch.get_device_module(device).synchronize(device)
        except RuntimeError:
            # The device is unusable, so PyTorch's attention would fail too.
            raise error from None
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__}: {lines[0] if lines else ''}"
    pairs = zip(actual, expected, strict=True)
    errors = [((x.cpu().double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]
    # NaN is never within the tolerance.
    if all(error <= _TOLERANCES[inputs["query"].dtype] for error in errors):
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
