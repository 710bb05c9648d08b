"""Time and memory of models: parts of a detector, interleaved in one process, against backbones of other projects."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
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
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from detectron2.utils.logger import log_every_n_seconds
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import nn
from torch.utils.benchmark.utils.timer import timer

from backbones import ConfigError
from backbones.attention.sliding_chunk import sample_shifts
from backbones.errors import GENERATOR, check_choice, closest
from projects_vil.config import check_device, load_config
from projects_vil.modeling import TimmBackbone, TransformerBackbone, build_transformer_backbone, stage_names
from projects_vil.solver import build_optimizer
from projects_vil.utils import peak_in_new_process

MEASURED_PARTS = ("attention", "backbone", "detector", "train-step")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BASELINES = ("r50", "swin_t")  # from detectron2; any other name is a timm model
# Suffix of a model's name -> the key of MODEL.TRANSFORMER that it sets; random shifts are sampled for each step.
_SUFFIXES = {
    "checkpointing": ("ACTIVATION_CHECKPOINTING", True),
    "sdpa": ("ATTENTION_BACKEND", "sdpa"),
    "triton": ("ATTENTION_BACKEND", "triton"),
    "shift": None,
}
_STRIDES = (4, 8, 16, 32)
_SEED = 0


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """One model, the part of it that is measured, and its input.

    Attributes:
        name: a variant, ``timm:MODEL`` or a config file, with suffixes: ``+checkpointing`` for activation
            checkpointing, ``+shift`` for random-shift training, ``+sdpa`` and ``+triton`` for an attention
            backend. Or a baseline (:func:`build_baseline`).
        is_baseline: whether it is a baseline.
        part: one of ``MEASURED_PARTS``: the first attention module, all feature maps of the backbone, inference of the
            detector, or a training step with the update of the optimizer.
        base: the config of the detector into which variants and baselines are built.
        size: height and width of the images in pixels; they are padded to multiples of 32.
        backward: whether gradients are computed too, for attention and backbones.
        device, dtype: dtype is a key of ``DTYPES``, and autocast is used unless it is float32.
        overrides: keys and values of the config, not for baselines.
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
    overrides: tuple[str, ...] = ()

    def build(self) -> Callable[[], None]:
        """Build the step that is measured.

        Raises:
            ConfigError: for a model that does not exist, or does not have the part.
        """
        torch.manual_seed(_SEED)
        name, *suffixes = self.name.split("+") if not self.is_baseline else [self.name]
        for suffix in suffixes:
            check_choice(f"suffix of {name}", suffix, _SUFFIXES)
        cfg = self._config(name, suffixes)
        images = torch.rand(self.batch_size, 3, *self.size, generator=torch.Generator().manual_seed(_SEED)) * 255
        if self.part in ("detector", "train-step"):
            module = model = build_model(cfg)
            if self.is_baseline:
                model.backbone = _with_fpn(cfg, build_baseline(name)).to(self.device)
            inputs = ([{"image": image, "instances": _objects(self.size)} for image in images],)
        else:
            if self.is_baseline:
                model = build_baseline(name)
            else:
                stages = list(stage_names(cfg.MODEL.TRANSFORMER.VARIANT))
                cfg.MODEL.TRANSFORMER.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = stages
                model = build_transformer_backbone(cfg, ShapeSpec(channels=3))
            model.to(self.device)
            height, width = (-(-side // _STRIDES[-1]) * _STRIDES[-1] for side in self.size)
            images = nn.functional.pad(images, (0, width - self.size[1], 0, height - self.size[0]))
            module, inputs = model, ((images / 64 - 2).to(self.device),)
            if self.part == "attention":
                module, inputs = self._attention(model, height, width)
        model.train(self._trains)
        shifted = model if "shift" in suffixes else None
        if shifted is not None and not (self._trains and sample_shifts(model, seed=None)):
            raise ConfigError(f"{self.name}: random shifts need sliding chunks, and backward or a training step")
        optimizer = build_optimizer(cfg, model) if self.part == "train-step" else None
        return self._step(module, inputs, optimizer, shifted)

    @property
    def _trains(self) -> bool:
        return self.part == "train-step" or (self.backward and self.part != "detector")

    def _config(self, name: str, suffixes: list[str]) -> CfgNode:
        is_variant = not self.is_baseline and not name.endswith(".yaml")
        keys = ["MODEL.TRANSFORMER.VARIANT", name] if is_variant else []
        keys += ["MODEL.TRANSFORMER.DROP_PATH", "0.0", *(() if self.is_baseline else self.overrides)]
        stages = stage_names(name) if is_variant else ()
        path = self.base if is_variant or self.is_baseline else Path(name)
        cfg = load_config(path, [*keys, "MODEL.DEVICE", self.device])
        cfg.defrost()
        if is_variant:
            # A CvT has three stages.
            cfg.MODEL.FPN.IN_FEATURES = [stage for stage in cfg.MODEL.FPN.IN_FEATURES if stage in stages]
        for key, value in filter(None, map(_SUFFIXES.get, suffixes)):
            cfg.MODEL.TRANSFORMER[key] = value
        check_device(cfg)
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
        raise ConfigError(f"{self.name} has no attention module of this project")

    def _step(
        self, module: nn.Module, inputs: tuple, optimizer: torch.optim.Optimizer | None, shifted: nn.Module | None
    ) -> Callable[[], None]:
        dtype, seeds = DTYPES[self.dtype], itertools.count(_SEED)

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

        # As in training
        return step if optimizer is None else torch.jit.optimized_execution(False)(step)


# -- baselines -------------------------------------------------------------------------------------


def build_baseline(name: str) -> Backbone:
    """Build a backbone with feature maps of strides 4, 8, 16 and 32, in this order.

    Args:
        name: ``"r50"``, detectron2's ResNet-50 with frozen BatchNorm and no frozen stage, ``"swin_t"``, its Swin-T
            without stochastic depth, or a model of timm with such feature maps, as ``"pvt_v2_b2"``.

    Raises:
        ConfigError: for an unknown name, and a model without such feature maps.
    """
    if name == "r50":
        cfg = get_cfg()
        cfg.MODEL.BACKBONE.FREEZE_AT = 0
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
        return build_resnet_backbone(cfg, ShapeSpec(channels=3))
    if name == "swin_t":
        return SwinTransformer(drop_path_rate=0.0)
    if not timm.is_model(name):
        hint = closest(name, [*BASELINES, *timm.list_models()])
        raise ConfigError(f"unknown baseline {name!r}: choose one of {', '.join(BASELINES)} or a model of timm{hint}")
    return TimmBackbone(f"timm:{name}", out_features=stage_names(f"timm:{name}"))


def _with_fpn(cfg: CfgNode, bottom_up: nn.Module) -> FPN:
    """Build the FPN of the config's detector: levels 3 to 7 from three feature maps, or 2 to 6 from four."""
    names, channels = list(bottom_up.output_shape()), cfg.MODEL.FPN.OUT_CHANNELS
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return FPN(bottom_up, names[1:], channels, top_block=LastLevelP6P7(channels, channels, in_feature="p5"))
    return FPN(bottom_up, names, channels, top_block=LastLevelMaxPool())


def _objects(size: tuple[int, int]) -> Instances:
    """Return four objects, each a quarter of the image."""
    height, width = size
    boxes = torch.tensor([[x, y, x + width / 2, y + height / 2] for x in (0, width / 2) for y in (0, height / 2)])
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
    masks = PolygonMasks([[polygon] for polygon in corners])
    return Instances(size, gt_boxes=Boxes(boxes), gt_classes=torch.zeros(4, dtype=torch.int64), gt_masks=masks)


# -- measurements ----------------------------------------------------------------------------------


def measure(
    cases: Sequence[BenchmarkCase], *, reference: int = 0, runs: int = 5, memory: bool = True
) -> list[dict[str, Any]]:
    """Time cases of one size, interleaved so that a busy machine slows all alike, after one warm-up of each.

    Args:
        cases: on one device.
        reference: index of the case that ratios are to.
        runs: how often each is timed.
        memory: whether memory is measured too: on a GPU by its own counter, else in a new process for each case.

    Returns:
        A row for each case: ``model``, ``part``, ``size``, ``batch_size``, ``backward``, ``device``, ``dtype``; the
        median of ``seconds``, and of the ``ratio`` to the reference in the same round, each with its quartiles;
        ``images_per_second``; and ``memory``, the bytes at the peak of one call above what there was before it, or None
        where it was not measured.

    Raises:
        ConfigError: as :meth:`BenchmarkCase.build`.
    """
    times, peaks = measure_steps(cases, runs=runs, memory=memory)
    fields = ("part", "size", "batch_size", "backward", "device", "dtype")
    rows = []
    for case, own, peak in zip(cases, times, peaks, strict=True):
        row = {"model": case.name} | {field: getattr(case, field) for field in fields}
        for name, values in (("seconds", own), ("ratio", own / times[reference])):
            low, row[name], high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            row[f"{name}_quartiles"] = [low, high]
        rows.append(row | {"images_per_second": case.batch_size / row["seconds"], "memory": peak})
    return rows


def measure_steps(cases: Sequence[Any], *, runs: int, memory: bool) -> tuple[np.ndarray, list[int | None]]:
    """Return the seconds of each case's step in each of ``runs`` rounds, (cases, runs), and the bytes at its peak.

    Args:
        cases: as for :func:`measure`, or others with a name, a device, and a ``build`` that returns a step.
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
        instead = "use smaller sizes, or leave memory out"
        for index, case in enumerate(cases):
            _log_progress(f"memory of {case.name}")
            peaks[index] = peak_in_new_process(case.build, what=case.name, instead=instead)
    return times, peaks


def _log_progress(message: str) -> None:
    log_every_n_seconds(logging.INFO, message, n=10, name=__name__)


def seconds_of(step: Callable[[], object], *, calls: int = 1) -> float:
    """Return the seconds of a call, the mean of ``calls``, until the GPU has finished them."""
    start = timer()
    for _ in range(calls):
        step()
    return (timer() - start) / calls


def _peak_on_gpu(step: Callable[[], None], device: str) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


# -- output ----------------------------------------------------------------------------------------


def format_measurements(rows: Sequence[dict[str, Any]], *, reference: str) -> str:
    """Format all models and sizes as a Markdown table, with quartiles in brackets; ratios are to ``reference``."""
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
    lines = [tabulate(cells, headers, tablefmt="github", disable_numparse=True)]
    for name, exponents in growth(rows).items():
        grows = [f"{what} grows as pixels^{value:.2f}" for what, value in exponents.items()]
        lines.append(f"{name}: {', '.join(grows)}")
    return "\n\n".join(lines)


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the exponents of pixels that time and memory grow by, for models at several sizes."""
    found = {}
    for name, own in _by_model(rows).items():
        if len(own) > 1:
            pixels = np.log([math.prod(row["size"]) for row in own])
            values = {"time": [row["seconds"] for row in own]}
            if all(row["memory"] for row in own):
                values["memory"] = [row["memory"] for row in own]
            found[name] = {what: float(np.polyfit(pixels, np.log(y), 1)[0]) for what, y in values.items()}
    return found


def plot_measurements(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Plot time, and memory where it was measured, against pixels, both axes logarithmic."""
    panels = {"time": ("seconds", "seconds", 1)}
    if all(row["memory"] for row in rows):
        panels["memory"] = ("memory", "peak memory, GB", 1e9)
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    exponents = growth(rows)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (what, (key, title, unit)) in zip(all_axes, panels.items(), strict=True):
        for name, own in _by_model(rows).items():
            label = f"{name} ({exponents[name][what]:.2f})" if name in exponents else name
            pixels = [math.prod(row["size"]) / 1e6 for row in own]
            axes.loglog(pixels, [row[key] / unit for row in own], marker="o", label=label)
        axes.set(title=title, xlabel="megapixels")
        axes.grid(which="both", alpha=0.3)
        axes.legend(title="exponent in brackets" if exponents else None, fontsize="small")
    # By which a later plot may replace this one; PNG and SVG take this key.
    figure.savefig(path, dpi=120, metadata={"Description": GENERATOR})


def _by_model(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["model"] for row in rows)
    rows = sorted(rows, key=lambda row: math.prod(row["size"]))
    return {name: [row for row in rows if row["model"] == name] for name in names}
