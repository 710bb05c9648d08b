"""Check and measure the backbones on a GPU with plain torch, Triton and timm.

The script needs neither detectron2 nor an installation of this project. It writes OUTPUT/STEP.json after each step, so
that an interrupted run keeps the results of the finished steps. All times are medians over interleaved rounds.

Example:
    python3 -m research.benchmarks.gpu --output output/gpu
    python3 -m research.benchmarks.gpu --steps versions correctness
    python3 -m research.benchmarks.gpu --device cpu --small    # try the script itself without a GPU
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity

from backbones import create_backbone
from backbones.attention import dense, triton_chunks
from backbones.attention.triton_chunks import Launch

# Variants with each mechanism and each option that changes a kernel.
CHECKED = {
    "vil_tiny": {},
    "vil_small_rpb": {},
    "vil_small_rpb exact": {"attention_mode": "exact"},
    "vil_small_rpb cyclic": {"attention_mode": "cyclic"},
    "vil_tiny_rpb chunk 15": {"chunk_size": 15},
    "vil_base_wide_rpb": {},
    "ls_small": {},
    "ls_base": {},
    "cvt_ls_13": {},
    "lit_s": {},
    "sra32_small": {},
    "performer_small": {},
    "global_small": {},
}
TIMED = ("vil_tiny_rpb", "vil_small_rpb", "ls_small", "cvt_ls_13", "lit_s", "litv2_s")
DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Setup:
    """The device and the sizes of the measurements.

    Attributes:
        device: The device.
        size: Height and width of images in pixels.
        checked_size: Height and width of the images that are compared with float64.
        batch: Images per batch.
        rounds: Timed rounds.
        processes: Processes that compile kernels at the same time.
        checked: Variants to compare with float64. A key of ``CHECKED`` may follow the name with options.
        timed: Variants to time.
        scaled: Variants to time with several image sizes in a row.
        swept: Variants, and the stage whose kernels are timed with other block sizes.
        blocks, warps, stages: Block sizes, numbers of warps and numbers of pipeline stages of the sweep.
    """

    device: str = "cuda"
    size: tuple[int, int] = (800, 1344)
    checked_size: tuple[int, int] = (416, 608)
    batch: int = 2
    rounds: int = 15
    processes: int = 12
    checked: tuple[str, ...] = tuple(CHECKED)
    timed: tuple[str, ...] = TIMED
    scaled: tuple[str, ...] = ("vil_small_rpb", "ls_small", "lit_s")
    swept: tuple[tuple[str, int], ...] = (("vil_small_rpb", 1), ("vil_small_rpb", 3), ("ls_small", 1))
    blocks: tuple[int, ...] = (32, 64)
    warps: tuple[int, ...] = (2, 4, 8)
    stages: tuple[int, ...] = (1, 2, 3)

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")


# -- models ----------------------------------------------------------------------------------------


def build(name: str, backend: str, **options: object) -> nn.Module:
    """Return a variant in training mode, with random weights and random biases that are not zero."""
    torch.manual_seed(0)
    model = create_backbone(name.split()[0], attention_backend=_backend(name, backend), **options)
    for parameter in model.parameters():
        if parameter.ndim < 2 or not parameter.any():
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.05)
    return model.train()


def _backend(name: str, backend: str) -> str:
    """Return the backend, or ``"sdpa"`` for a family that does not have it, and without a GPU."""
    if backend == "triton" and not torch.cuda.is_available():
        return "sdpa"
    if backend == "triton":
        with contextlib.suppress(ValueError):
            create_backbone(name.split()[0], attention_backend="triton")
            return "triton"
        return "sdpa"
    return backend


def swin_t(size: tuple[int, int]) -> nn.Module:
    """Return timm's Swin-T with four feature maps."""
    options = {"img_size": size, "strict_img_size": False, "features_only": True, "pretrained": False}
    return timm.create_model("swin_tiny_patch4_window7_224", **options)


def resnet50(size: tuple[int, int]) -> nn.Module:
    """Return timm's ResNet-50 with feature maps of strides 4 to 32."""
    return timm.create_model("resnet50", features_only=True, out_indices=(1, 2, 3, 4), pretrained=False)


BASELINES = {"swin_t": swin_t, "r50": resnet50}


def features_of(model: nn.Module, images: Tensor) -> list[Tensor]:
    features = model(images)
    return list(features.values() if isinstance(features, dict) else features)


def train_step(model: nn.Module, images: Tensor) -> None:
    """Run the forward pass and the backward pass."""
    model.zero_grad()
    sum(x.float().square().mean() for x in features_of(model, images)).backward()


def autocast(setup: Setup, dtype: str) -> torch.autocast:
    return torch.autocast(setup.device.split(":")[0], getattr(torch, dtype), enabled=dtype != "float32")


# -- measurements ----------------------------------------------------------------------------------


def synchronize(setup: Setup) -> None:
    if setup.is_gpu:
        torch.cuda.synchronize(setup.device)


def milliseconds(setup: Setup, step: Callable[[], object]) -> float:
    """Return the time of one call on the device."""
    if not setup.is_gpu:
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize(setup.device)
    return start.elapsed_time(end)


def compare(setup: Setup, steps: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Time steps in interleaved rounds after two calls of each.

    Returns:
        For each step: ``first_ms``, the first call with compilation; ``ms``, the median; ``ratio``, the median of the
        ratios to the first step in the same round; ``launch_ms``, the median time until the host has launched all
        kernels; and ``memory_gb``, the peak above the memory before the call. A step that fails has an ``error``
        instead.
    """
    results: dict[str, dict] = {}
    for name, step in steps.items():
        try:
            results[name] = {"first_ms": milliseconds(setup, step)}
            step()
            synchronize(setup)
            if setup.is_gpu:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                results[name]["memory_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        except (RuntimeError, ValueError, NotImplementedError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    times: dict[str, list] = {name: [] for name, result in results.items() if "error" not in result}
    launches: dict[str, list] = {name: [] for name in times}
    for _ in range(setup.rounds):
        for name in times:
            synchronize(setup)
            times[name].append(milliseconds(setup, steps[name]))
            start = time.perf_counter()
            steps[name]()
            launches[name].append(1e3 * (time.perf_counter() - start))
            synchronize(setup)
    for name in times:
        ratios = [ms / first for ms, first in zip(times[name], next(iter(times.values())), strict=True)]
        medians = map(statistics.median, (times[name], ratios, launches[name]))
        results[name] |= dict(zip(("ms", "ratio", "launch_ms"), medians, strict=True))
    return results


def add_kernels(setup: Setup, steps: dict[str, Callable[[], object]], results: dict[str, dict[str, float]]) -> None:
    """Add ``kernel_ms``, the sum of the kernels' times, and ``kernels``, their number, to results of :func:`compare`.

    Call it after all other measurements of a process, because the profiler may stay attached.
    """
    for name in [name for name, result in results.items() if setup.is_gpu and "error" not in result]:
        kernels = kernel_times(setup, steps[name])
        results[name] |= {
            "kernel_ms": sum(us for _, us, _ in kernels) / 1e3,
            "kernels": sum(number for *_, number in kernels),
        }


def kernel_times(setup: Setup, step: Callable[[], object]) -> list[tuple[str, float, int]]:
    """Return names, microseconds and calls of the kernels in a step, the longest first."""
    step()
    synchronize(setup)
    activity = ProfilerActivity.CUDA if setup.is_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        synchronize(setup)
    rows = [
        (event.key, event.self_device_time_total if setup.is_gpu else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
    ]
    # Calls of the CUDA runtime take no time on the device.
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected values."""
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


# -- steps -----------------------------------------------------------------------------------------


def versions(setup: Setup) -> dict:
    """Return the versions of the libraries, the device, and its measured peak rates."""
    facts = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    if not setup.is_gpu:
        return facts
    import triton

    properties = torch.cuda.get_device_properties(setup.device)
    facts |= {
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": properties.name,
        "capability": torch.cuda.get_device_capability(),
        "memory_gb": properties.total_memory / 1e9,
        "multiprocessors": properties.multi_processor_count,
    }
    a, b = torch.randn(2, 8192, 8192, device=setup.device, dtype=torch.bfloat16)
    source = torch.randn(2**29, device=setup.device)
    target = torch.empty_like(source)
    steps = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    times = {name: result["ms"] / 1e3 for name, result in compare(setup, steps).items()}
    facts["teraflops"] = 2 * 8192**3 / times["product"] / 1e12
    facts["copy_gb_per_s"] = 2 * source.numel() * 4 / times["copy"] / 1e9
    return facts


def correctness(setup: Setup) -> dict:
    """Compare features and gradients of whole backbones with float64 on the same device, in parallel processes."""
    cases = [(name, backend, dtype) for name in setup.checked for backend in ("triton", "sdpa") for dtype in DTYPES]
    check = functools.partial(_errors, setup)
    results, context = {}, multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(setup.processes, mp_context=context) as pool:
        for (name, backend, dtype), result in zip(cases, pool.map(check, cases), strict=True):
            results.setdefault(name, {}).setdefault(dtype, {})[backend] = result
    for name, by_dtype in results.items():
        for dtype, by_backend in by_dtype.items():
            line = {backend: _summary(result) for backend, result in by_backend.items()}
            print(f"{name:24} {dtype:9} {line}", flush=True)
    return results


def _summary(result: dict) -> str:
    if "error" in result:
        return result["error"][:200]
    return f"{result['features']:.1e} {result['gradients']:.1e} ({result['worst']}) {result['seconds']:.1f}s"


def _errors(setup: Setup, case: tuple[str, str, str]) -> dict:
    """Return the largest relative errors of features and of gradients, and the parameter with the largest one."""
    name, backend, dtype = case
    start = time.perf_counter()
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        images = torch.randn(1, 3, *setup.checked_size, generator=torch.Generator().manual_seed(1)).to(setup.device)
        model = build(name, backend, **CHECKED.get(name, {})).to(setup.device)
        with autocast(setup, dtype):
            features = features_of(model, images)
            _loss(features).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        exact = build(name, "sdpa", **CHECKED.get(name, {})).to(setup.device).double()
        exact.load_state_dict({key: x.double() for key, x in model.state_dict().items()})
        exact_features = features_of(exact, images.double())
        _loss(exact_features).backward()
        expected = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        if expected.keys() != gradients.keys():
            raise RuntimeError(f"gradients differ: {sorted(expected.keys() ^ gradients.keys())[:5]}")
        largest = max(x.norm().item() / math.sqrt(x.numel()) for x in expected.values())
        # Gradients that are zero but for rounding, such as the bias of keys, have no relative error.
        errors = {
            name: relative_error(gradients[name], x)
            for name, x in expected.items()
            if x.norm().item() / math.sqrt(x.numel()) >= 1e-6 * largest
        }
        worst = max(errors, key=errors.get)
        return {
            "features": max(map(relative_error, features, exact_features)),
            "gradients": errors[worst],
            "median_gradient": statistics.median(errors.values()),
            "worst": worst,
            "seconds": time.perf_counter() - start,
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:800], "traceback": traceback.format_exc()[-3000:]}


def _loss(features: list[Tensor]) -> Tensor:
    """Return a sum with a different weight for each value."""
    return sum((x.float() * torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)).mean() for x in features)


def attention(setup: Setup) -> dict:
    """Time the attention of each stage by kernel: Triton, and PyTorch's attention with and without cuDNN."""
    results, (height, width) = {}, setup.size
    for name in setup.timed:
        model = build(name, "sdpa").to(setup.device)
        for index, (stage, stride) in enumerate(zip(model.stages, model.strides, strict=True), start=1):
            module = stage.blocks[0].attention
            if module is None:
                continue
            tokens = _tokens(setup, module, height // stride, width // stride)
            steps = {}
            for kernel, backward in itertools.product(_kernels_of(module), (False, True)):
                step = functools.partial(_attend, setup, module, tokens, kernel, backward)
                steps[f"{kernel} {'backward' if backward else 'forward'}"] = step
            results[f"{name} stage{index}"] = by_kernel = compare(setup, steps)
            add_kernels(setup, steps, by_kernel)
            for label, result in by_kernel.items():
                print(f"{name} stage{index} {label}: {_short(result)}", flush=True)
    return results


def _kernels_of(module: nn.Module) -> tuple[str, ...]:
    backends = getattr(type(module), "backends", {"triton": None})
    has_triton = "triton" in backends or not isinstance(module, dense.TokenAttention)
    has_triton &= torch.cuda.is_available()
    return (*(["triton"] if has_triton else []), "pytorch", "pytorch with cudnn", "efficient")


def _tokens(setup: Setup, module: nn.Module, height: int, width: int) -> tuple:
    """Return random arguments for an attention module."""
    dim = next(p.shape[0] for name, p in module.named_parameters() if name.startswith("proj") and p.ndim == 2)
    tokens = torch.randn(setup.batch, module.num_global_tokens + height * width, dim, device=setup.device)
    return tokens.requires_grad_(), (height, width)


def _attend(setup: Setup, module: nn.Module, arguments: tuple, kernel: str, backward: bool) -> None:
    module.backend = "triton" if kernel == "triton" else "sdpa"
    with _pytorch_kernels(kernel), torch.set_grad_enabled(backward), autocast(setup, "bfloat16"):
        output = module(*arguments)
        if backward:
            output.float().square().mean().backward()


@contextlib.contextmanager
def _pytorch_kernels(kernel: str) -> Iterator[None]:
    """Change which kernels PyTorch's attention may choose."""
    allowed = dense._KERNELS
    choices = {
        "pytorch with cudnn": [SDPBackend.CUDNN_ATTENTION, *allowed],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    }
    dense._KERNELS = choices.get(kernel, allowed)
    try:
        yield
    finally:
        dense._KERNELS = allowed


def _short(result: dict) -> str:
    return result.get("error") or " ".join(f"{key} {value:.3f}" for key, value in result.items())


def sizes(setup: Setup) -> dict:
    """Time the first and the second training step for ten image sizes in a row, as in multi-scale training."""
    results = {}
    scales = [1.0, 0.6, 0.64, 0.68, 0.72, 0.76, 0.8, 0.84, 0.88, 0.92]
    for name, kernel in itertools.product(setup.scaled, ("triton", "pytorch", "pytorch with cudnn")):
        model = build(name, "triton" if kernel == "triton" else "sdpa").to(setup.device)
        rows = []
        for scale in scales:
            side = [32 * round(scale * x / 32) for x in setup.size]
            images = torch.randn(setup.batch, 3, *side, device=setup.device)
            with _pytorch_kernels(kernel), autocast(setup, "bfloat16"):
                step = functools.partial(train_step, model, images)
                rows.append([milliseconds(setup, step), milliseconds(setup, step)])
        results[f"{name} {kernel}"] = rows
        print(f"{name} {kernel}: " + ", ".join(f"{a:.0f}/{b:.0f}" for a, b in rows), flush=True)
    return results


def backbones(setup: Setup) -> dict:
    """Measure the time and memory of inference and training steps of backbones, Swin-T and ResNet-50."""
    results, all_steps = {}, {}
    images = torch.randn(setup.batch, 3, *setup.size, device=setup.device)
    models = {name: function(setup.size).train().to(setup.device) for name, function in BASELINES.items()}
    models |= {f"{name} {b}": build(name, b).to(setup.device) for name in setup.timed for b in ("triton", "sdpa")}
    for dtype, backward in (("bfloat16", False), ("bfloat16", True), ("float32", True)):
        steps = {name: functools.partial(_run, setup, model, images, dtype, backward) for name, model in models.items()}
        label = f"{dtype} {'forward and backward' if backward else 'forward'}"
        all_steps[label], results[label] = steps, compare(setup, steps)
    for label, by_model in results.items():
        add_kernels(setup, all_steps[label], by_model)
        for name, result in by_model.items():
            print(f"{label} {name}: {_short(result)}", flush=True)
    return results


def _run(setup: Setup, model: nn.Module, images: Tensor, dtype: str, backward: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with torch.set_grad_enabled(backward), autocast(setup, dtype):
        train_step(model, images) if backward else features_of(model, images)


def profile(setup: Setup) -> dict:
    """Return the kernels of a training step and their times on the device, the longest first."""
    results = {}
    images = torch.randn(setup.batch, 3, *setup.size, device=setup.device)
    ours = itertools.product(setup.timed, ("triton", "sdpa"))
    for name, backend in (*((name, "") for name in BASELINES), *ours):
        model = BASELINES[name](setup.size) if name in BASELINES else build(name, backend)
        model.train().to(setup.device)
        rows = kernel_times(setup, functools.partial(_run, setup, model, images, "bfloat16", True))
        label = f"{name} {backend}".rstrip()
        results[label] = rows
        print(f"{label}: {sum(us for _, us, _ in rows) / 1e3:.1f} ms in {sum(n for *_, n in rows)} kernels")
        for kernel, us, number in rows[:14]:
            print(f"    {us / 1e3:8.2f} ms {number:5} {kernel[:110]}", flush=True)
    return results


def sweep(setup: Setup) -> dict:
    """Time each Triton kernel of sliding chunks with other block sizes, warps and pipeline stages."""
    if not setup.is_gpu:
        return {}
    launches = [
        Launch(positions=p, tokens=t, channels=32, num_warps=w, num_stages=s)
        for p, t, w, s in itertools.product(setup.blocks, setup.blocks, setup.warps, setup.stages)
    ]
    context = multiprocessing.get_context("spawn")
    # All stages of a variant have the same kernels.
    firsts = {name: stage for name, stage in reversed(setup.swept)}
    tasks = [(name, stage, launch) for name, stage in firsts.items() for launch in launches]
    with concurrent.futures.ProcessPoolExecutor(setup.processes, mp_context=context) as pool:
        compiled = dict(zip(tasks, pool.map(functools.partial(_compile, setup), tasks), strict=True))
    results, original = {}, triton_chunks.launch_parameters
    height, width = setup.size
    for name, index in setup.swept:
        model = build(name, "triton").to(setup.device)
        module, stride = model.stages[index - 1].blocks[0].attention, model.strides[index - 1]
        arguments = _tokens(setup, module, height // stride, width // stride)
        rows = []
        for launch in [None, *launches]:
            if launch is not None and not compiled[(name, firsts[name], launch)]:
                continue
            triton_chunks.launch_parameters = original if launch is None else functools.partial(_always, launch)
            times = kernel_times(setup, functools.partial(_attend, setup, module, arguments, "triton", True))
            microseconds = {kernel: us for kernel, us, _ in times if kernel in KERNEL_NAMES}
            rows.append({"launch": dataclasses.astuple(launch) if launch else None, **microseconds})
        triton_chunks.launch_parameters = original
        results[f"{name} stage{index}"] = rows
        for kernel in KERNEL_NAMES:
            best = sorted((row for row in rows if kernel in row), key=lambda row: row[kernel])
            if best:
                default = next(row[kernel] for row in rows if row["launch"] is None)
                text = ", ".join(f"{row['launch']} {row[kernel]:.0f}" for row in best[:4])
                print(f"{name} stage{index} {kernel}: default {default:.0f} us; {text}", flush=True)
    return results


KERNEL_NAMES = (
    *("forward_kernel", "query_grad_kernel", "key_grad_kernel"),
    *("local_bias_grad_kernel", "global_grad_kernel"),
)


def _always(launch: Launch, *arguments: object) -> Launch:
    return launch


def _compile(setup: Setup, task: tuple[str, int, Launch]) -> bool:
    """Compile the kernels for a launch and return whether they run."""
    name, stage, launch = task
    triton_chunks.launch_parameters = functools.partial(_always, launch)
    try:
        model = build(name, "triton").to(setup.device)
        module = model.stages[stage - 1].blocks[0].attention
        _attend(setup, module, _tokens(setup, module, 33, 45), "triton", True)
        synchronize(setup)
    except Exception as error:
        print(f"{launch}: {type(error).__name__}: {str(error)[:150]}", flush=True)
        return False
    return True


# The profiler slows down later steps, so whole backbones are timed before it is used.
STEPS = {
    function.__name__: function for function in (versions, correctness, sizes, backbones, attention, profile, sweep)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/gpu"))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="variants to check and to time")
    parser.add_argument("--small", action="store_true", help="use small images and few rounds")
    args = parser.parse_args()
    setup = Setup(device=args.device)
    if args.small:
        small = {"size": (64, 96), "checked_size": (64, 96), "batch": 1, "rounds": 1, "processes": 2}
        setup = dataclasses.replace(setup, **small, blocks=(32,), warps=(4,), stages=(1,))
    if args.models:
        names = tuple(args.models)
        swept = tuple((name, 1) for name in names)
        setup = dataclasses.replace(setup, checked=names, timed=names, scaled=names, swept=swept)
    args.output.mkdir(parents=True, exist_ok=True)
    start, failed = time.perf_counter(), False
    for name in args.steps:
        print(f"== {name} ({time.perf_counter() - start:.0f} s)", flush=True)
        try:
            result = STEPS[name](setup)
        except Exception as error:
            traceback.print_exc()
            result, failed = {"error": f"{type(error).__name__}: {error}"}, True
        (args.output / f"{name}.json").write_text(json.dumps(result, indent=1, default=str))
        if name == "versions":
            print(json.dumps(result), flush=True)
    print(f"== done ({time.perf_counter() - start:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", "100")
    sys.exit(main())
