"""What is timed: a part of a model, on images of one size."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, build_model
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from backbones import InputError
from backbones.attention.sliding_chunk import draw_shifts
from backbones.utils.errors import check_choice
from backbones.variants import get_variant, stage_names
from projects_vil.analysis.benchmark.baselines import build_baseline
from projects_vil.config import check_device, load_config
from projects_vil.modeling import build_transformer_backbone
from projects_vil.solver import build_optimizer

WHATS = ("attention", "backbone", "detector", "train-step")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What the words behind a name change in MODEL.TRANSFORMER; shifts are drawn for each step.
_MODIFIERS = {
    "checkpointing": ("ACTIVATION_CHECKPOINTING", True),
    "sdpa": ("ATTENTION_BACKEND", "sdpa"),
    "triton": ("ATTENTION_BACKEND", "triton"),
    "shift": None,
}
# Feature maps of a bottom-up network are added by FPN.
_DIVISOR = 32
# Of the seeds of a measurement's images and shifts.
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, what of it is timed, and on what.

    Attributes:
        name: a variant, or a config file; ``+checkpointing`` behind it is activation checkpointing, ``+shift``
            random-shift training, ``+sdpa`` and ``+triton`` are attention backends. Or a baseline
            (:func:`.baselines.build_baseline`).
        is_baseline: whether it is one.
        what: of ``WHATS``: the attention of the first stage that has any, all maps of the backbone, images in and
            detections out, or a step of training with its optimizer's.
        base: the folder of ``retinanet.yaml`` and ``mask_rcnn.yaml``, which variants and baselines are put into.
        detector: which of them.
        size: height and width of the images in pixels; they are filled up to multiples of 32.
        batch_size: images at once.
        backward: whether gradients are made too, where ``what`` is attention or backbone.
        device, dtype: dtype of ``DTYPES``; but for float32 it is autocast's.
        overrides: keys and values by turns, of the models that are no baselines.
    """

    name: str
    is_baseline: bool
    what: str
    base: Path
    detector: str
    size: tuple[int, int]
    batch_size: int = 1
    backward: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    overrides: tuple[str, ...] = ()

    def build(self) -> Callable[[], None]:
        """What is timed, ready to be called.

        Raises:
            InputError: where there is no such model, or it has no such part.
        """
        torch.manual_seed(_SEED)
        model_name, *modifiers = self.name.split("+") if not self.is_baseline else [self.name]
        for modifier in modifiers:
            check_choice(f"modifier of {model_name}", modifier, _MODIFIERS)
        cfg = self._config(model_name, modifiers)
        if self.what in ("detector", "train-step"):
            step, model = self._detector_step(cfg)
        else:
            step, model = self._part_step(cfg)
        if "shift" in modifiers:
            step = self._shifting(step, model, model_name)
        return step

    @property
    def _trains(self) -> bool:
        return self.what == "train-step" or (self.backward and self.what != "detector")

    def _config(self, model_name: str, modifiers: list[str]) -> CfgNode:
        path, own = self.base / f"{self.detector}.yaml", []
        is_variant = not self.is_baseline and not model_name.endswith(".yaml")
        if is_variant:
            stages = stage_names(get_variant(model_name))
            own = ["MODEL.TRANSFORMER.NAME", model_name]
        elif not self.is_baseline:
            path = Path(model_name)
        overrides = () if self.is_baseline else self.overrides
        cfg = load_config(path, [*own, "MODEL.TRANSFORMER.DROP_PATH", "0.0", *overrides, "MODEL.DEVICE", self.device])
        cfg.defrost()
        if is_variant:
            # A CvT has three stages.
            cfg.MODEL.FPN.IN_FEATURES = [name for name in cfg.MODEL.FPN.IN_FEATURES if name in stages]
        if {"sdpa", "triton"} <= set(modifiers):
            raise InputError(f"{self.name} has two attention backends: name one")
        for key, value in filter(None, map(_MODIFIERS.get, modifiers)):
            cfg.MODEL.TRANSFORMER[key] = value
        check_device(cfg)
        return cfg

    def _images(self) -> Tensor:
        """(B, 3, H, W), 0 to 255."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.rand(self.batch_size, 3, *self.size, generator=generator) * 255

    def _part_step(self, cfg: CfgNode) -> tuple[Callable[[], None], nn.Module]:
        if self.is_baseline:
            model = build_baseline(self.name)
        else:
            model = build_transformer_backbone(_with_all_maps(cfg), ShapeSpec(channels=3))
        model.to(self.device).train(self._trains)
        height, width = (-(-side // _DIVISOR) * _DIVISOR for side in self.size)
        if self.what == "backbone":
            images = nn.functional.pad(self._images(), (0, width - self.size[1], 0, height - self.size[0]))
            images = (images / 64 - 2).to(self.device)
            return self._run(model, lambda: list(model(images).values())), model
        attention, inputs = self._attention(model, height, width)
        return self._run(attention, lambda: [x for x in attention(*inputs) if x is not None]), model

    def _attention(self, model: nn.Module, height: int, width: int) -> tuple[nn.Module, tuple[Tensor, Tensor | None]]:
        if self.is_baseline:
            raise InputError(f"--what attention is of this project's models alone: leave out --against {self.name}")
        for stage, stride in zip(model.net.stages, model.net.strides, strict=False):
            attention = stage.blocks[0].attention
            if attention is not None:
                dim = stage.blocks[0].attention_norm.normalized_shape[0]
                tokens = torch.randn(self.batch_size, height // stride, width // stride, dim, device=self.device)
                tokens.requires_grad_(self._trains)
                shared = stage.global_tokens
                shared = None if shared is None else shared.detach().expand(self.batch_size, -1, -1).clone()
                return attention, (tokens, shared)
        raise InputError(f"{self.name} has no attention")

    def _run(self, model: nn.Module, forward: Callable[[], list[Tensor]]) -> Callable[[], None]:
        def outputs() -> list[Tensor]:
            with self._precision():
                return forward()

        if not self._trains:
            return torch.no_grad()(lambda: outputs() and None)

        def step() -> None:
            model.zero_grad()
            sum(x.float().square().mean() for x in outputs()).backward()

        return step

    def _detector_step(self, cfg: CfgNode) -> tuple[Callable[[], None], nn.Module]:
        model = build_model(cfg)
        if self.is_baseline:
            model.backbone = _with_fpn(cfg, build_baseline(self.name)).to(self.device)
        model.train(self._trains)
        batch = [{"image": image, "instances": _objects(self.size)} for image in self._images()]

        def outputs() -> dict[str, Tensor] | list[dict]:
            with self._precision():
                return model(batch)

        if not self._trains:
            return torch.no_grad()(lambda: outputs() and None), model
        optimizer = build_optimizer(cfg, model)

        def step() -> None:
            optimizer.zero_grad()
            with EventStorage():
                losses = outputs()
            sum(losses.values()).backward()
            optimizer.step()

        return step, model

    def _shifting(self, step: Callable[[], None], model: nn.Module, name: str) -> Callable[[], None]:
        if not self._trains:
            raise InputError(f"{self.name}: shifts are of training alone: add --backward, or --what train-step")
        if not draw_shifts(model, seed=None):
            raise InputError(f"{self.name}: {name} has no sliding chunks")
        seed = _SEED

        def shifting() -> None:
            nonlocal seed
            draw_shifts(model, seed=seed)
            seed += 1
            step()

        return shifting

    def _precision(self) -> torch.autocast:
        """Of what is computed forward, as a trainer has it."""
        dtype = DTYPES[self.dtype]
        return torch.autocast(torch.device(self.device).type, dtype, enabled=dtype != torch.float32)


def _with_all_maps(cfg: CfgNode) -> CfgNode:
    """A config whose backbone gives the maps of all its stages, as baselines do."""
    cfg = cfg.clone()
    cfg.defrost()
    stages = stage_names(get_variant(cfg.MODEL.TRANSFORMER.NAME))
    cfg.MODEL.TRANSFORMER.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = list(stages)
    return cfg


def _with_fpn(cfg: CfgNode, bottom_up: nn.Module) -> FPN:
    """As the config's own detector has it: levels 3 to 7 from three maps, or 2 to 6 from four."""
    names, channels = list(bottom_up.output_shape()), cfg.MODEL.FPN.OUT_CHANNELS
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return FPN(bottom_up, names[1:], channels, top_block=LastLevelP6P7(channels, channels, in_feature="p5"))
    return FPN(bottom_up, names, channels, top_block=LastLevelMaxPool())


def _objects(size: tuple[int, int]) -> Instances:
    """Four objects, each a quarter of the image."""
    height, width = size
    boxes = torch.tensor([[x, y, x + width / 2, y + height / 2] for x in (0, width / 2) for y in (0, height / 2)])
    objects = Instances(size, gt_boxes=Boxes(boxes), gt_classes=torch.zeros(4, dtype=torch.int64))
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
    objects.gt_masks = PolygonMasks([[polygon] for polygon in corners])
    return objects
