"""Which kernel computes attention: the fastest that gives the right answers on this device.

Nothing is decided by hope: where there are several, each is held against the reference on a small case, and the right
ones are timed once on a map as detectors have it.
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

Kernel = Callable[..., Tensor]

logger = logging.getLogger(__name__)
# Chunks along the axes of the maps that kernels are compared and timed on, and images; the first have a rest.
_SMALL, _LARGE = (2, 3, 2), (16, 24, 2)
_RUNS = 5
# Of the largest value, where float32 products may be of TensorFloat-32.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclasses.dataclass(frozen=True)
class Situation:
    """What decides which kernel of sliding chunks is the fastest.

    Sizes of images do not: several processes have different ones, and have to decide alike.

    Attributes:
        device: where the tensors are.
        dtype: of what is computed.
        heads, channels: M, and D of each.
        window_size, mode, shift: as of the kernels.
        num_global: G.
        biases: names of those there are.
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
        parts = [f"{self.heads} heads of {self.channels}", f"window {self.window_size}", str(self.dtype)[6:]]
        parts += ["learned bias"] * bool({"local_bias", "global_bias"} & set(self.learned))
        parts += ["one neighbour"] * self.is_shifted
        return f"attention of {', '.join(parts)}, {'training' if self.learned else 'inference'}"

    def inputs(self, rows: int, cols: int, batch: int, *, rest: int = 0) -> dict[str, Tensor]:
        """Random tensors of a map of ``rows`` x ``cols`` chunks and ``rest`` tokens more."""
        generator = torch.Generator().manual_seed(0)
        places = self.window_size**2
        height, width = rows * self.window_size + rest, cols * self.window_size + rest
        shapes = dict.fromkeys(("query", "key", "value"), (batch, self.heads, height, width, self.channels))
        if self.num_global:
            shapes |= dict.fromkeys(("global_key", "global_value"), (batch, self.heads, self.num_global, self.channels))
        of_biases = {"local_bias": (self.heads, places, 9 * places), "global_bias": (self.heads, self.num_global)}
        shapes |= {name: of_biases[name] for name in self.biases}
        return {
            name: torch.randn(shape, generator=generator)
            .to(self.device, self.dtype)
            .requires_grad_(name in self.learned)
            for name, shape in shapes.items()
        }

    @property
    def options(self) -> dict[str, object]:
        """Of the kernels, beside the tensors."""
        shift = (0, 1) if self.is_shifted else None
        return {"window_size": self.window_size, "mode": self.mode, "shift": shift}


_decided: dict[tuple[Situation, tuple[str, ...]], str] = {}


def choose_kernel(kernels: Mapping[str, Kernel], situation: Situation) -> str:
    """The name of the fastest kernel that gives the reference's answers.

    Decided once in a process; of the processes of one run the first one decides. The log has a line of it.

    Args:
        kernels: by name, with the signature of :func:`.sliding_chunk.sliding_chunk_attention`; the first one is taken
            where none is right.
        situation: what they are used for.
    """
    key = situation, tuple(kernels)
    if key not in _decided:
        # Neither autocast nor what a caller does with the tensors that autograd saves, as checkpointing does, are of
        # another thread.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            chosen = thread.submit(_decide, kernels, situation).result()
        _decided[key] = _agreed(chosen, situation)
    return _decided[key]


def _decide(kernels: Mapping[str, Kernel], situation: Situation) -> str:
    times: dict[str, float] = {}
    for name, kernel in kernels.items():
        # Whatever is wrong with a compiler, a driver or a kernel, there is another one.
        try:
            error = _error(kernel, situation)
            if error > _TOLERANCES[situation.dtype]:
                logger.warning("%s: %s is not taken: it is off by %.1e of the largest value", situation, name, error)
            else:
                times[name] = _seconds(kernel, situation)
        except Exception as failure:
            said = str(failure).strip().splitlines()
            logger.warning(
                "%s: %s is not taken: %s: %s", situation, name, type(failure).__name__, said[0] if said else ""
            )
    if not times:
        return next(iter(kernels))
    chosen = min(times, key=times.get)
    others = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in times.items() if name != chosen)
    logger.info("%s: %s (%.2f ms%s)", situation, chosen, 1e3 * times[chosen], f"; {others}" if others else "")
    return chosen


def _error(kernel: Kernel, situation: Situation) -> float:
    """Of the output and of each gradient, the largest as a share of its largest value."""
    inputs = situation.inputs(*_SMALL, rest=1)
    exact = {name: x.detach().cpu().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    pairs = zip(
        _outputs_and_gradients(kernel, inputs, situation),
        _outputs_and_gradients(reference.sliding_chunk_attention, exact, situation),
        strict=True,
    )
    shares = [((x.cpu().double() - y).abs().max() / y.abs().max().clamp(min=1e-12)).item() for x, y in pairs]
    # Of numbers that are none the largest is none.
    return max(shares) if all(share == share for share in shares) else float("inf")


def _outputs_and_gradients(kernel: Kernel, inputs: dict[str, Tensor], situation: Situation) -> Sequence[Tensor]:
    output = kernel(**inputs, **situation.options)
    learned = [inputs[name] for name in situation.learned]
    if not learned:
        return [output]
    weights = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=torch.float64).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, learned, weights.to(output.dtype))]


def _seconds(kernel: Kernel, situation: Situation) -> float:
    inputs = situation.inputs(*_LARGE)
    times = []
    for _ in range(2 + _RUNS):
        _wait(situation.device)
        start = time.perf_counter()
        _outputs_and_gradients(kernel, inputs, situation)
        _wait(situation.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(chosen: str, situation: Situation) -> str:
    """What the first process of a run has chosen.

    By the store that processes met at, since no process may have to wait for one that never comes here: in an
    evaluation some may have no image.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return chosen
    # Private, and the only way to it: without it each process takes what it has found.
    get_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if get_store is None:
        return chosen
    # One may run on cuda:0, and another on cuda:1.
    key = f"projects_vil/{dataclasses.replace(situation, device=torch.device(situation.device.type))!r}"
    first = get_store().compare_set(key, "", chosen).decode()
    if first != chosen:
        logger.info("%s: %s, as in the first process", situation, first)
    return first
