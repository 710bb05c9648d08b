"""Choice of the attention kernel: the fastest one that is correct on this device.

Where there are several kernels, each is compared with the reference on a small input, and the correct ones are timed
once on a feature map of the size that detectors have.
"""

import concurrent.futures
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from backbones.attention import reference
from backbones.attention.dense import split_globals
from backbones.errors import ConfigError

Kernel = Callable[..., Tensor]

logger = logging.getLogger(__name__)
# Rows and columns of chunks, and images, of the inputs that kernels are compared and timed on.
_SMALL, _LARGE = (2, 3, 2), (16, 24, 2)
_RUNS = 5
# Relative to the largest value; float32 products may use TensorFloat-32.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """The properties of a call that decide which kernel of sliding chunks is the fastest.

    Image sizes are left out: they differ between processes, which have to choose the same kernel.

    Attributes:
        device: where the tensors are.
        dtype: type of the computation.
        heads, channels: M, and D of each.
        window_size, mode: those of the kernels.
        is_shifted: whether only one neighbour is seen.
        num_global: G.
        biases: names of the biases that the call has.
        learned: names of the tensors that need gradients.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    channels: int
    window_size: int
    mode: str
    is_shifted: bool
    num_global: int
    biases: tuple[str, ...]
    learned: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.heads} heads of {self.channels}", f"window {self.window_size}", self.mode]
        parts += [f"{self.num_global} global", *self.biases, str(self.dtype)[6:]]
        parts += ["one neighbour"] * self.is_shifted
        return f"attention of {', '.join(parts)}, {'training' if self.learned else 'inference'} on {self.device}"

    def inputs(self, rows: int, cols: int, batch: int, *, rest: int = 0) -> dict[str, Tensor]:
        """Random inputs of ``rows`` x ``cols`` chunks and ``rest`` tokens more, in a module's memory layout."""
        generator = torch.Generator().manual_seed(0)

        def random_tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        size = rows * self.window_size + rest, cols * self.window_size + rest
        length = self.num_global + size[0] * size[1]
        query = random_tensor(batch, length, self.heads, self.channels)
        key, value = random_tensor(batch, length, 2 * self.heads, self.channels).chunk(2, dim=2)
        inputs = {}
        for name, x in (("query", query), ("key", key), ("value", value)):
            global_x, local_x = split_globals(x.transpose(1, 2), self.num_global, dim=2)
            inputs[name] = local_x.unflatten(2, size)
            if name != "query" and self.num_global:
                inputs[f"global_{name}"] = global_x
        positions = self.window_size**2
        if "local_bias" in self.biases:
            inputs["local_bias"] = random_tensor(self.heads, positions, 9 * positions)
        if "global_bias" in self.biases:
            inputs["global_bias"] = random_tensor(self.heads, self.num_global)
        return {name: x.detach().requires_grad_(name in self.learned) for name, x in inputs.items()}

    @property
    def options(self) -> dict[str, object]:
        """Return the keyword arguments of the kernels other than the tensors."""
        shift = (0, 1) if self.is_shifted else None
        return {"window_size": self.window_size, "mode": self.mode, "shift": shift}


_decided: dict[tuple[KernelKey, tuple[str, ...], bool], str] = {}


def choose_kernel(kernels: Mapping[str, Kernel], kernel_key: KernelKey) -> str:
    """Return the name of the fastest kernel that agrees with the reference.

    It is chosen once in a process, and by the first of several processes of a run. The choice is logged.

    Args:
        kernels: functions by name, with the signature of :func:`.sliding_chunk.sliding_chunk_attention`; the first
            one is taken where none of them is right.
        kernel_key: what they are used for.
    """
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    key = kernel_key, tuple(kernels), is_one_of_many
    if key in _decided:
        return _decided[key]
    # A new thread has neither the caller's autocast state nor its saved-tensor hooks.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        times, is_final = thread.submit(_compare, kernels, kernel_key).result()
    chosen = min(times, key=times.get) if times else next(iter(kernels))
    timings = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    logger.info("%s: %s%s", kernel_key, chosen, f" ({timings})" if timings else " (not timed)")
    # Where memory was short it is tried again.
    if is_final:
        _decided[key] = chosen = _agreed(chosen, kernel_key) if is_one_of_many else chosen
    return chosen


def _compare(kernels: Mapping[str, Kernel], kernel_key: KernelKey) -> tuple[dict[str, float], bool]:
    """The seconds of the kernels that are right, and whether all could be tried."""
    times: dict[str, float] = {}
    is_final = True
    for name, kernel in kernels.items():
        # If a compiler, a driver or a kernel fails, there is another kernel.
        try:
            # On the threads of a device a backward pass would wait for the caller's, where that is one itself.
            with torch.autograd.set_multithreading_enabled(False):
                error = _error(kernel, kernel_key)
                if error <= _TOLERANCES[kernel_key.dtype]:
                    times[name] = _seconds(kernel, kernel_key)
                    continue
            logger.warning(
                "%s: kernel %s is not used: it differs by %.1e of the largest value", kernel_key, name, error
            )
        except ConfigError:
            # The kernel does not support this type, or heads of this size.
            continue
        except Exception as failure:
            is_final = is_final and not isinstance(failure, torch.OutOfMemoryError)
            lines = str(failure).strip().splitlines()
            logger.warning(
                "%s: kernel %s is not used: %s: %s", kernel_key, name, type(failure).__name__, lines[0] if lines else ""
            )
    return times, is_final


def _error(kernel: Kernel, kernel_key: KernelKey) -> float:
    """Return the largest relative error of the output and the gradients, each relative to its largest value."""
    inputs = kernel_key.inputs(*_SMALL, rest=1)
    exact = {name: x.detach().cpu().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    weights = _weights(inputs)
    pairs = zip(
        _outputs_and_gradients(kernel, inputs, weights, kernel_key),
        _outputs_and_gradients(reference.sliding_chunk_attention, exact, weights.cpu().double(), kernel_key),
        strict=True,
    )
    shares = [((x.cpu().double() - y).abs().max() / y.abs().max().clamp(min=1e-12)).item() for x, y in pairs]
    # A NaN counts as an infinite error.
    return max(shares) if all(share == share for share in shares) else float("inf")


def _weights(inputs: dict[str, Tensor]) -> Tensor:
    """The gradient of the output, (B, M, H, W, D), in memory as a module's."""
    query = inputs["query"].detach()
    weights = torch.linspace(-1, 1, query.numel(), device=query.device).to(query.dtype)
    return weights.view(query.movedim(1, -2).shape).movedim(-2, 1)


def _outputs_and_gradients(
    kernel: Kernel, inputs: dict[str, Tensor], weights: Tensor, kernel_key: KernelKey
) -> Sequence[Tensor]:
    output = kernel(**inputs, **kernel_key.options)
    learned = [inputs[name] for name in kernel_key.learned]
    if not learned:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, learned, weights)]


def _seconds(kernel: Kernel, kernel_key: KernelKey) -> float:
    inputs = kernel_key.inputs(*_LARGE)
    weights, times = _weights(inputs), []
    for _ in range(2 + _RUNS):
        _wait(kernel_key.device)
        start = time.perf_counter()
        _outputs_and_gradients(kernel, inputs, weights, kernel_key)
        _wait(kernel_key.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(chosen: str, kernel_key: KernelKey) -> str:
    """Return the choice of the first process of a run.

    It is exchanged by the rendezvous store, since no process may wait for one that never comes here: in an evaluation
    some may have no image.
    """
    # One may run on cuda:0, and another on cuda:1.
    key = f"backbones.attention/{dataclasses.replace(kernel_key, device=torch.device(kernel_key.device.type))!r}"
    try:
        # Private, and the only way to it.
        first = torch.distributed.distributed_c10d._get_default_store().compare_set(key, "", chosen).decode()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("%s: kernel %s; other processes may choose another one: %s", kernel_key, chosen, error)
        return chosen
    if first != chosen:
        logger.info("%s: kernel %s, as in the first process", kernel_key, first)
    return first
