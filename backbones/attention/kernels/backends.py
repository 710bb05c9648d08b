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
from backbones.utils.errors import InputError

Kernel = Callable[..., Tensor]

logger = logging.getLogger(__name__)
# Chunks along the axes of the maps that kernels are compared and timed on, and images; the first have a rest.
_SMALL, _LARGE = (2, 3, 2), (16, 24, 2)
_RUNS = 5
# Of the largest value, where float32 products may be of TensorFloat-32.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclasses.dataclass(frozen=True)
class Situation:
    """What decides which kernel of sliding chunks is the fastest.

    Sizes of images do not: several processes have different ones, and have to decide alike.

    Attributes:
        device: where the tensors are.
        dtype: of what is computed.
        heads, channels: M, and D of each.
        window_size, mode: as of the kernels.
        is_shifted: whether one neighbour alone is seen.
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
        parts = [f"{self.heads} heads of {self.channels}", f"window {self.window_size}", self.mode]
        parts += [f"{self.num_global} global", *self.biases, str(self.dtype)[6:]]
        parts += ["one neighbour"] * self.is_shifted
        return f"attention of {', '.join(parts)}, {'training' if self.learned else 'inference'} on {self.device}"

    def inputs(self, rows: int, cols: int, batch: int, *, rest: int = 0) -> dict[str, Tensor]:
        """Random tensors of a map of ``rows`` x ``cols`` chunks and ``rest`` tokens more, in memory as a module's."""
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        def tokens(*sizes: int) -> dict[str, Tensor]:
            query = drawn(batch, *sizes, self.heads, self.channels)
            key, value = drawn(batch, *sizes, 2 * self.heads, self.channels).chunk(2, dim=-2)
            return {name: x.movedim(-2, 1) for name, x in (("query", query), ("key", key), ("value", value))}

        found = tokens(rows * self.window_size + rest, cols * self.window_size + rest)
        if self.num_global:
            found |= {f"global_{name}": x for name, x in tokens(self.num_global).items() if name != "query"}
        places = self.window_size**2
        if "local_bias" in self.biases:
            # Looked up in a table whose rows are of all heads.
            found["local_bias"] = drawn(places, 9 * places, self.heads).movedim(-1, 0)
        if "global_bias" in self.biases:
            found["global_bias"] = drawn(self.heads, self.num_global)
        return {name: x.detach().requires_grad_(name in self.learned) for name, x in found.items()}

    @property
    def options(self) -> dict[str, object]:
        """Of the kernels, beside the tensors."""
        shift = (0, 1) if self.is_shifted else None
        return {"window_size": self.window_size, "mode": self.mode, "shift": shift}


_decided: dict[tuple[Situation, tuple[str, ...], bool], str] = {}


def choose_kernel(kernels: Mapping[str, Kernel], situation: Situation) -> str:
    """The name of the fastest kernel that gives the reference's answers.

    Decided once in a process; of the processes of one run the first one decides. The log has a line of it.

    Args:
        kernels: by name, with the signature of :func:`.sliding_chunk.sliding_chunk_attention`; the first one is taken
            where none is right.
        situation: what they are used for.
    """
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    key = situation, tuple(kernels), is_one_of_many
    if key in _decided:
        return _decided[key]
    # Neither autocast nor what a caller does with the tensors that autograd saves, as checkpointing does, are of
    # another thread.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        times, is_final = thread.submit(_compare, kernels, situation).result()
    chosen = min(times, key=times.get) if times else next(iter(kernels))
    told = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    logger.info("%s: %s%s", situation, chosen, f" ({told})" if told else ", of which nothing is known")
    # Where memory was short it is tried again.
    if is_final:
        _decided[key] = chosen = _agreed(chosen, situation) if is_one_of_many else chosen
    return chosen


def _compare(kernels: Mapping[str, Kernel], situation: Situation) -> tuple[dict[str, float], bool]:
    """The seconds of the kernels that are right, and whether all could be tried."""
    times: dict[str, float] = {}
    is_final = True
    for name, kernel in kernels.items():
        # Whatever is wrong with a compiler, a driver or a kernel, there is another one.
        try:
            # On the threads of a device a backward pass would wait for the caller's, where that is one itself.
            with torch.autograd.set_multithreading_enabled(False):
                error = _error(kernel, situation)
                if error <= _TOLERANCES[situation.dtype]:
                    times[name] = _seconds(kernel, situation)
                    continue
            logger.warning("%s: %s is not taken: it is off by %.1e of the largest value", situation, name, error)
        except InputError:
            # It is not for this type, or for heads of this size.
            continue
        except Exception as failure:
            is_final = is_final and not isinstance(failure, torch.OutOfMemoryError)
            said = str(failure).strip().splitlines()
            logger.warning(
                "%s: %s is not taken: %s: %s", situation, name, type(failure).__name__, said[0] if said else ""
            )
    return times, is_final


def _error(kernel: Kernel, situation: Situation) -> float:
    """Of the output and of each gradient, the largest as a share of its largest value."""
    inputs = situation.inputs(*_SMALL, rest=1)
    exact = {name: x.detach().cpu().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    weights = _weights(inputs)
    pairs = zip(
        _outputs_and_gradients(kernel, inputs, weights, situation),
        _outputs_and_gradients(reference.sliding_chunk_attention, exact, weights.cpu().double(), situation),
        strict=True,
    )
    shares = [((x.cpu().double() - y).abs().max() / y.abs().max().clamp(min=1e-12)).item() for x, y in pairs]
    # Of numbers that are none the largest is none.
    return max(shares) if all(share == share for share in shares) else float("inf")


def _weights(inputs: dict[str, Tensor]) -> Tensor:
    """The gradient of the output, (B, M, H, W, D), in memory as a module's."""
    query = inputs["query"].detach()
    weights = torch.linspace(-1, 1, query.numel(), device=query.device).to(query.dtype)
    return weights.view(query.movedim(1, -2).shape).movedim(-2, 1)


def _outputs_and_gradients(
    kernel: Kernel, inputs: dict[str, Tensor], weights: Tensor, situation: Situation
) -> Sequence[Tensor]:
    output = kernel(**inputs, **situation.options)
    learned = [inputs[name] for name in situation.learned]
    if not learned:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, learned, weights)]


def _seconds(kernel: Kernel, situation: Situation) -> float:
    inputs = situation.inputs(*_LARGE)
    weights, times = _weights(inputs), []
    for _ in range(2 + _RUNS):
        _wait(situation.device)
        start = time.perf_counter()
        _outputs_and_gradients(kernel, inputs, weights, situation)
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
    # One may run on cuda:0, and another on cuda:1.
    key = f"backbones.attention/{dataclasses.replace(situation, device=torch.device(situation.device.type))!r}"
    try:
        # Private, and the only way to it.
        first = torch.distributed.distributed_c10d._get_default_store().compare_set(key, "", chosen).decode()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("%s: %s, whatever other processes take: %s", situation, chosen, error)
        return chosen
    if first != chosen:
        logger.info("%s: %s, as in the first process", situation, first)
    return first
