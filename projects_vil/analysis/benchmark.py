"""Time and memory of attention, backbones, detectors and training steps, next to baselines of other projects.

All models run interleaved in one process, so that a busy machine slows all of them equally.
"""

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, build_model
from detectron2.modeling.backbone import Backbone, build_resnet_backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from detectron2.modeling.backbone.swin import SwinTransformer
from detectron2.utils.events import EventStorage
from detectron2.utils.logger import log_every_n_seconds
from tabulate import tabulate
from torch import nn
from torch.utils.benchmark.utils.timer import timer

from backbones import ConfigError
from backbones.attention.sliding_chunk import sample_shifts
from backbones.attention.triton_check import automatic_backend, choice_key, choices_file, read_choices
from backbones.errors import closest
from backbones.files import write_text
from projects_vil.config import choose_device, load_config, set_precision
from projects_vil.engine.auto_micro_batch import random_image
from projects_vil.modeling import TimmBackbone, TransformerBackbone, build_transformer_backbone, stage_names
from projects_vil.solver import build_optimizer
from projects_vil.utils import peak_in_new_process

BASELINES = ("r50", "swin_t")  # of detectron2; other names are timm models


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """A model, the part of it to measure, and its input.

    Attributes:
        name: A variant, ``timm:MODEL`` or a config file, followed by any of the suffixes ``+shift`` (random shifts) and
            ``+KEY=VALUE`` for a key of ``MODEL.TRANSFORMER``; or the name of a baseline.
        is_baseline: Whether ``name`` is a baseline, see :func:`build_baseline`.
        part: One of :data:`vil.choices.BENCHMARK_PARTS`: the first attention module, the backbone with all feature
            maps, detector inference, or a training step with the optimizer.
        base: The config of the detector for variants and baselines.
        size: Height and width of the images in pixels, padded to multiples of 32.
        batch_size: Images per batch.
        backward: Whether to include the backward pass of attention and backbones.
        device: The device.
        dtype: One of :data:`vil.choices.DTYPES`; autocast is used unless it is float32.
        overrides: Config keys and values, not applied to baselines.
    """

    name: str
    is_baseline: bool
    part: str
    base: Path
    size: tuple[int, int]
    batch_size: int = 1
    backward: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def build(self) -> Callable[[], None]:
        """Return a function that runs one step.

        Raises:
            ConfigError: If the model does not exist or does not have the part.
        """
        torch.manual_seed(0)
        name, *suffixes = self.name.split("+") if not self.is_baseline else [self.name]
        cfg = self._config(name, suffixes)
        if self.part in ("detector", "train-step"):
            module = model = build_model(cfg)
            if self.is_baseline:
                model.backbone = _with_fpn(cfg, build_baseline(name)).to(self.device)
            inputs = ([random_image(cfg, *self.size, num_objects=4) for _ in range(self.batch_size)],)
        else:
            if self.is_baseline:
                model = build_baseline(name)
            else:
                stages = list(stage_names(cfg.MODEL.TRANSFORMER.VARIANT))
                cfg.MODEL.TRANSFORMER.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = stages
                model = build_transformer_backbone(cfg, ShapeSpec(channels=3))
            model.to(self.device)
            height, width = (-(-side // 32) * 32 for side in self.size)
            module, inputs = model, (torch.randn(self.batch_size, 3, height, width, device=self.device),)
            if self.part == "attention":
                module, inputs = self._attention(model, height, width)
        model.train(self._trains)
        shifted = model if "shift" in suffixes else None
        if shifted is not None and not (self._trains and sample_shifts(model, seed=None)):
            advice = "Choose a variant with sliding chunks, and measure a backward pass or a training step."
            raise ConfigError(f"'{self.name}' cannot use random shifts. {advice}")
        optimizer = build_optimizer(cfg, model) if self.part == "train-step" else None
        return self._step(module, inputs, optimizer, shifted)

    @property
    def _trains(self) -> bool:
        return self.part == "train-step" or (self.backward and self.part != "detector")

    def _config(self, name: str, suffixes: list[str]) -> CfgNode:
        is_variant = not self.is_baseline and not name.endswith(".yaml")
        values = {"MODEL.TRANSFORMER.VARIANT": name} if is_variant else {}
        values |= {"MODEL.TRANSFORMER.DROP_PATH": "0.0"} | ({} if self.is_baseline else self.overrides)
        for key, _, value in (suffix.partition("=") for suffix in suffixes if suffix != "shift"):
            values[f"MODEL.TRANSFORMER.{key}"] = value
        path = self.base if is_variant or self.is_baseline else Path(name)
        cfg = load_config(path, values | {"MODEL.DEVICE": self.device})
        cfg.defrost()
        if is_variant:
            # CvT has only three stages.
            cfg.MODEL.FPN.IN_FEATURES = [one for one in cfg.MODEL.FPN.IN_FEATURES if one in stage_names(name)]
        cfg = choose_device(cfg, requested=True)
        set_precision(cfg)
        return cfg

    def _attention(self, model: nn.Module, height: int, width: int) -> tuple[nn.Module, tuple]:
        is_ours = isinstance(model, TransformerBackbone)
        for stage, stride in zip(model.net.stages, model.net.strides, strict=False) if is_ours else ():
            attention = stage.blocks[0].attention
            if attention is not None:
                dim, size = stage.blocks[0].attention_norm.normalized_shape[0], (height // stride, width // stride)
                length = attention.num_global_tokens + math.prod(size)
                tokens = torch.randn(self.batch_size, length, dim, device=self.device)
                return attention, (tokens.requires_grad_(self._trains), size)
        raise ConfigError(f"'{self.name}' has no attention module of this project. Measure its backbone instead.")

    def _step(
        self, module: nn.Module, inputs: tuple, optimizer: torch.optim.Optimizer | None, shifted: nn.Module | None
    ) -> Callable[[], None]:
        dtype, seeds = getattr(torch, self.dtype), itertools.count()

        def step() -> None:
            if shifted is not None:
                sample_shifts(shifted, seed=next(seeds))
            module.zero_grad()
            with (
                torch.set_grad_enabled(self._trains),
                EventStorage(),
                torch.autocast(torch.device(self.device).type, dtype, enabled=dtype != torch.float32),
            ):
                outputs = module(*inputs)
            if not self._trains:
                return
            outputs = outputs.values() if isinstance(outputs, dict) else outputs
            if optimizer is None:
                sum(x.float().square().mean() for x in outputs if x is not None).backward()
            else:
                sum(outputs).backward()
                optimizer.step()

        # Run TorchScript as the trainer does.
        return step if optimizer is None else torch.jit.optimized_execution(False)(step)


# -- baselines -------------------------------------------------------------------------------------


def build_baseline(name: str) -> Backbone:
    """Build a baseline with feature maps of strides 4, 8, 16 and 32, in this order.

    Args:
        name: ``"r50"``, detectron2's ResNet-50 with frozen batch norm and no frozen stage; ``"swin_t"``, its Swin-T
            without drop path; or a timm model with these feature maps, such as ``"pvt_v2_b2"``.

    Raises:
        ConfigError: If the name is unknown or the model does not have these feature maps.
    """
    if name == "r50":
        cfg = get_cfg()
        cfg.MODEL.BACKBONE.FREEZE_AT = 0
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
        return build_resnet_backbone(cfg, ShapeSpec(channels=3))
    if name == "swin_t":
        return SwinTransformer(drop_path_rate=0.0)
    if not timm.is_model(name):
        hint = closest(name, [*BASELINES, *timm.list_models()]) or "."
        raise ConfigError(f"Unknown baseline {name!r}{hint} Use {', '.join(BASELINES)} or a timm model.")
    return TimmBackbone(f"timm:{name}", out_features=stage_names(f"timm:{name}"), drop_path_rate=0.0)


def _with_fpn(cfg: CfgNode, bottom_up: nn.Module) -> FPN:
    """Return the FPN of the detector: P3 to P7 for RetinaNet, P2 to P6 for others."""
    names, channels = list(bottom_up.output_shape()), cfg.MODEL.FPN.OUT_CHANNELS
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return FPN(bottom_up, names[1:], channels, top_block=LastLevelP6P7(channels, channels, in_feature="p5"))
    return FPN(bottom_up, names, channels, top_block=LastLevelMaxPool())


# -- measurements ----------------------------------------------------------------------------------


def measure(cases: Sequence[BenchmarkCase], *, reference: int = 0, runs: int = 5, memory: bool = True) -> list[dict]:
    """Measure the time and memory of cases, after one warm-up of each.

    Args:
        cases: Cases of one size on one device.
        reference: The index of the case that ratios are relative to.
        runs: Timed runs of each case.
        memory: Whether to measure memory: on a GPU with its counter, otherwise in a new process per case.

    Returns:
        One row per case: ``model``, ``part``, ``size``, ``batch_size``, ``backward``, ``device`` and ``dtype``; the
        medians of ``seconds`` and of the ``ratio`` to the reference in the same round, with ``seconds_quartiles`` and
        ``ratio_quartiles``; ``images_per_second``; and ``memory``, the peak bytes of one call above the memory before
        it, or ``None`` if not measured.

    Raises:
        ConfigError: See :meth:`BenchmarkCase.build`.
    """
    times, peaks = measure_steps(cases, runs=runs, memory=memory)
    fields = ("part", "size", "batch_size", "backward", "device", "dtype")
    rows = []
    for case, seconds, peak in zip(cases, times, peaks, strict=True):
        row = {"model": case.name} | {field: getattr(case, field) for field in fields}
        for name, values in (("seconds", seconds), ("ratio", seconds / times[reference])):
            low, row[name], high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            row[f"{name}_quartiles"] = [low, high]
        rows.append(row | {"images_per_second": case.batch_size / row["seconds"], "memory": peak})
    return rows


def measure_steps(cases: Sequence[Any], *, runs: int, memory: bool) -> tuple[np.ndarray, list[int | None]]:
    """Return the seconds of each step in each round, (cases, runs), and the peak bytes of each step or ``None``.

    Args:
        cases: Objects with ``name``, ``device`` and ``build``, which returns a step.
        runs, memory: See :func:`measure`.
    """
    steps = [case.build() for case in cases]
    is_cuda = cases[0].device.startswith("cuda")
    for step in steps:
        step()
    peaks = [_peak_on_gpu(step, cases[0].device) if memory and is_cuda else None for step in steps]
    times = np.empty((len(steps), runs))
    for run in range(runs):
        for index, step in enumerate(steps):
            _log_progress(f"round {run + 1} of {runs}: {cases[index].name}")
            times[index, run] = seconds_of(step)
    del steps, step
    if memory and not is_cuda:
        instead = "Use smaller sizes, or do not measure the memory."
        for index, case in enumerate(cases):
            _log_progress(f"memory of {case.name}")
            peaks[index] = peak_in_new_process(case.build, what=case.name, instead=instead)
    return times, peaks


def _log_progress(message: str) -> None:
    log_every_n_seconds(logging.INFO, message, n=10, name=__name__)


def seconds_of(step: Callable[[], object], *, calls: int = 1) -> float:
    """Return the mean seconds of ``calls`` calls, synchronized with the GPU."""
    start = timer()
    for _ in range(calls):
        step()
    return (timer() - start) / calls


def _peak_on_gpu(step: Callable[[], None], device: str) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def tune_attention(cases: Sequence[BenchmarkCase], *, runs: int = 5, measure: Callable = measure_steps) -> list[str]:
    """Measure the attention backends on the shapes of models, and store the faster one as the choice of ``"auto"``.

    A step is a forward and a backward pass of a backbone with all feature maps. The Triton kernels are chosen if they
    are at least 5% faster. Before its first use, each kernel is compared with the reference (:func:`.choose_kernel`).
    A kernel that differs is replaced by PyTorch's attention, so it is not faster.

    Args:
        cases: Models and image sizes, on one GPU and with one dtype.
        runs: Timed runs of each backend.
        measure: Measures steps, as :func:`measure_steps`.

    Returns:
        Lines with the times, the choice and its file.

    Raises:
        ConfigError: If the device or a model has no Triton kernels, or if the file cannot be written.
    """
    if not cases[0].device.startswith("cuda"):
        raise ConfigError("The option --tune needs a GPU. Run it on a machine with a GPU.")
    steps = [
        dataclasses.replace(case, name=f"{case.name}+ATTENTION_BACKEND={backend}", part="backbone", backward=True)
        for backend in ("sdpa", "triton")
        for case in cases
    ]
    medians = np.median(measure(steps, runs=runs, memory=False)[0], axis=1)
    sdpa, triton = medians.reshape(2, -1).sum(axis=1)
    chosen, path = "triton" if triton < 0.95 * sdpa else "sdpa", choices_file()
    key = choice_key(torch.device(cases[0].device), getattr(torch, cases[0].dtype))
    write_text(path, json.dumps(read_choices() | {key: chosen}, indent=1))
    automatic_backend.cache_clear()
    measured = f"{key}: sdpa {1e3 * sdpa:.1f} ms, triton {1e3 * triton:.1f} ms"
    return [measured, f"ATTENTION_BACKEND auto is now {chosen}: wrote '{path}'"]


# -- output ----------------------------------------------------------------------------------------


def format_measurements(rows: Sequence[dict[str, Any]], *, reference: str) -> str:
    """Format the rows of :func:`measure` as a Markdown table, with quartiles in parentheses."""
    headers = ["model", "size", "seconds", "images/s", f"x {reference}", "memory, GB", f"x {reference}"]
    memories = {row["size"]: row["memory"] for row in rows if row["model"] == reference}
    cells = []
    for row in rows:
        seconds, ratio = (
            "{:.{digits}f} ({:.{digits}f} to {:.{digits}f})".format(row[key], *row[f"{key}_quartiles"], digits=digits)
            for key, digits in (("seconds", 3), ("ratio", 2))
        )
        memory = ["", ""]
        if row["memory"] is not None:
            memory = [f"{row['memory'] / 1e9:.2f}", f"{row['memory'] / memories[row['size']]:.2f}"]
        size = "{} x {}".format(*row["size"])
        cells.append([row["model"], size, seconds, f"{row['images_per_second']:.2f}", ratio, *memory])
    return tabulate(cells, headers, tablefmt="github", disable_numparse=True)
