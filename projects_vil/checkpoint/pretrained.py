"""Pretrained weights: official checkpoints, and classifiers of this project and of timm."""

import dataclasses
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from backbones import ConfigError
from backbones.backbone import Backbone
from backbones.build import VARIANTS, get_variant
from backbones.checkpoint_files import check_writable, read_checkpoint, state_dict_of, write_checkpoint
from backbones.convert import (
    HEAD,
    HEAD_NAMES,
    ConversionReport,
    OfficialCheckpoint,
    Pieces,
    check_names,
    convert_state_dict,
    convert_tensors,
    detect_format,
)
from backbones.errors import first_of
from backbones.lit import GLOBAL_TOKEN, LITVariant, initial_values
from backbones.vil import ViLVariant
from projects_vil.checkpoint.metadata import METADATA_KEY, OFFICIAL_INPUT, CheckpointMetadata, InputFormat
from projects_vil.checkpoint.zoo import find_weights, is_zoo_name, zoo_entry
from projects_vil.data.catalog import categories_of
from projects_vil.modeling import TimmBackbone

BACKBONE_PREFIX = "backbone.bottom_up.net."
_ANCHORS = 9  # per position, in the official RetinaNets

_MMSEGMENTATION_PARTS = ("neck", "decode_head", "auxiliary_head")
_BIAS_TABLE = "attn.local_relative_position_bias_table"
_CONFIG_BUFFER = re.compile(
    r"(proposal_generator\.)?anchor_generator\.cell_anchors\.\d|pixel_(mean|std)|data_preprocessor\.(mean|std)"
)

# Layers of the heads: mmdetection's name -> detectron2's
_RETINANET = {
    f"bbox_head.{branch}_convs.{i}.conv": f"head.{subnet}.{2 * i}"
    for branch, subnet in (("cls", "cls_subnet"), ("reg", "bbox_subnet"))
    for i in range(4)
} | {
    "bbox_head.retina_cls": "head.cls_score",
    "bbox_head.retina_reg": "head.bbox_pred",
    "neck.fpn_convs.3.conv": "backbone.top_block.p6",
    "neck.fpn_convs.4.conv": "backbone.top_block.p7",
}
_MASK_RCNN = {
    "rpn_head.rpn_conv": "proposal_generator.rpn_head.conv",
    "rpn_head.rpn_cls": "proposal_generator.rpn_head.objectness_logits",
    "rpn_head.rpn_reg": "proposal_generator.rpn_head.anchor_deltas",
    "roi_head.bbox_head.shared_fcs.0": "roi_heads.box_head.fc1",
    "roi_head.bbox_head.shared_fcs.1": "roi_heads.box_head.fc2",
    "roi_head.bbox_head.fc_cls": "roi_heads.box_predictor.cls_score",
    "roi_head.bbox_head.fc_reg": "roi_heads.box_predictor.bbox_pred",
    **{f"roi_head.mask_head.convs.{i}.conv": f"roi_heads.mask_head.mask_fcn{i + 1}" for i in range(4)},
    "roi_head.mask_head.upsample": "roi_heads.mask_head.deconv",
    "roi_head.mask_head.conv_logits": "roi_heads.mask_head.predictor",
}


@dataclasses.dataclass
class ConvertedCheckpoint:
    """A converted checkpoint.

    Attributes:
        source: The project that the checkpoint is from.
        contents: The contents for :func:`backbones.checkpoint_files.write_checkpoint`.
        report: What happened to each name.
        options: Keywords of ``create_backbone`` or ``create_classifier`` for the model that the weights are for.
    """

    source: str
    contents: dict[str, object]
    report: ConversionReport
    options: dict[str, object] = dataclasses.field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the report as text: a summary, then groups of resized, dropped and initialized tensors."""
        lines = [f"{self.source}: {self.report.summary()}"]
        resized = Counter((re.sub(r"blocks\.\d+", "blocks.*", k), *shapes) for k, shapes in self.report.resized.items())
        for (name, old, new), number in resized.items():
            lines.append(f"resized: {name} {old} to {new}" + (f", {number} times" if number > 1 else ""))
        for action in ("dropped", "initialized"):
            names_of = defaultdict(list)
            for name, reason in getattr(self.report, action).items():
                names_of[reason].append(name)
            lines += [f"{action}: {first_of(names, 1)}: {reason}" for reason, names in names_of.items()]
        options = self.options.items()
        if "num_classes" in self.options:
            arguments = "".join(f", {key}={value!r}" for key, value in options)
            lines.append(f"load it with create_classifier({self.contents[METADATA_KEY]['variant']!r}{arguments})")
        elif options:
            overrides = [f"MODEL.TRANSFORMER.{key.upper()} {shlex.quote(str(value))}" for key, value in options]
            lines.append(f"load it with {' '.join(overrides)}")
        return lines

    def as_json(self) -> dict[str, object]:
        """Return the metadata and the whole report."""
        return {
            "source": self.source,
            **{key: value for key, value in self.contents.items() if key != "model"},
            "summary": self.report.summary(),
            **dataclasses.asdict(self.report),
        }


def convert_file(
    source: str | Path,
    output: str | Path,
    variant: str | None = None,
    *,
    img_size: tuple[int, int] | None = None,
    classifier: bool = False,
) -> ConvertedCheckpoint:
    """Convert an official checkpoint and write the result. Nothing is written if a name or a shape does not match.

    Args:
        source: ``.pth`` or ``.safetensors`` file, or a name of the model zoo.
        output: ``.pth`` or ``.safetensors`` file.
        variant: One of ``backbones.list_variants()``; None for the variant in the model zoo.
        img_size: Height and width in pixels of the largest image, to which position tables are resized once; None for
            the default sizes of the model.
        classifier: Convert for ``create_classifier`` instead of a detector. Then ``img_size`` is the input size; None
            for the size in the model zoo, in the checkpoint's tables, or of the variant.

    Raises:
        ConfigError: If a file cannot be read or written, or if the checkpoint does not match the variant.
    """
    entry = zoo_entry(str(source)) if is_zoo_name(source) else None
    if variant is None and entry is None:
        raise ConfigError(f"The variant of '{source}' is unknown. Add --model, for example --model vil_small_rpb.")
    variant = variant or entry.variant
    chunk_size = None
    if classifier and entry and variant == entry.variant:
        chunk_size = entry.chunk_size
        if entry.img_size is not None:
            img_size = img_size or (entry.img_size, entry.img_size)
    get_variant(variant)
    check_writable(output)
    source = find_weights(str(source))
    official = detect_format(read_checkpoint(source))
    if official is None:
        projects = "vision-longformer, VisionLongformerForObjectDetection, transformer-ls, LIT or LITv2"
        raise ConfigError(f"'{source}' is not an official checkpoint. Use a checkpoint of {projects}.")
    try:
        converted = convert_official(official, variant, img_size=img_size, chunk_size=chunk_size, classifier=classifier)
    except ConfigError as error:
        raise ConfigError(f"Cannot convert '{source}' ({official.project}): {error}") from error
    write_checkpoint(output, converted.contents)
    return converted


def convert_official(
    official: OfficialCheckpoint,
    variant: str,
    *,
    img_size: tuple[int, int] | None = None,
    chunk_size: Sequence[int] | None = None,
    classifier: bool = False,
    model_options: Mapping[str, object] | None = None,
) -> ConvertedCheckpoint:
    """Convert a checkpoint in memory; see :func:`convert_file`.

    Args:
        chunk_size: Chunk size of each stage of a classifier; None for the sizes of the checkpoint's tables, or else of
            the variant. Absolute positions do not show the chunk size.
        model_options: Keywords of ``create_backbone`` for an existing model; None to derive them from the checkpoint.
    """
    if classifier and not official.classifier:
        raise ConfigError("The checkpoint has no classification head. Leave out --classifier.")
    sizes, weights, options = get_variant(variant), official.backbone, {}
    if model_options is None:
        if isinstance(sizes, ViLVariant):
            options = _vil_options(weights, sizes)
        if classifier:
            options |= _classifier_options(weights, sizes, img_size, chunk_size)
            weights = _with_centered_tables(weights, sizes, options)
        elif img_size is not None:
            # Images are landscape and portrait, and MODEL.TRANSFORMER.MAX_IMG_SIZE is one side.
            options["max_img_size"] = max(img_size)
            if isinstance(sizes, (ViLVariant, LITVariant)):
                options["position_interpolation"] = "once"
        model_options = options
    state_dict, report = convert_state_dict(weights, variant, classifier=classifier, model_options=model_options)
    categories: Mapping[int, str] = {}
    if not classifier:
        heads = _convert_heads(official, variant, report)
        state_dict = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in state_dict.items()} | heads
        # All official detectors are trained on COCO.
        rows = {"head.cls_score.weight": _ANCHORS * 80, "roi_heads.box_predictor.cls_score.weight": 81}
        if any(name in heads and len(heads[name]) == number for name, number in rows.items()):
            categories = categories_of("coco_2017_val")
    own = {key: value for key, value in options.items() if key in sizes.options}
    metadata = CheckpointMetadata(
        variant=variant,
        options=own,
        classes=tuple(categories.values()) or None,
        category_ids=tuple(categories) or None,
        input=OFFICIAL_INPUT,
    )
    others = {key: value for key, value in options.items() if key not in own}
    saved = metadata.to_dict() | {"source": official.project, "classifier": classifier} | others
    return ConvertedCheckpoint(official.project, {"model": state_dict, METADATA_KEY: saved}, report, options)


# -- Classifiers -----------------------------------------------------------------------------------


def is_classifier(state_dict: Mapping[str, object]) -> bool:
    """Return whether the names belong to a :class:`backbones.backbone.Classifier`."""
    return any(name.removeprefix("module.").startswith("backbone.stages.") for name in state_dict)


def named_variant(contents: Mapping[str, object]) -> str | None:
    """Return the variant in the arguments that timm's training script saves, or None."""
    # read_checkpoint loads a Namespace as an object with the same attributes.
    name = getattr(contents.get("args"), "model", None)
    return name if isinstance(name, str) and name in VARIANTS else None


def convert_classifier(contents: Mapping[str, object], variant: str, net: Backbone) -> ConvertedCheckpoint:
    """Convert a classifier of this project for a backbone.

    Args:
        contents: Contents of the checkpoint.
        variant: The backbone's variant.
        net: The backbone, on any device. Its values are not read.

    Returns:
        The checkpoint of a detector without FPN and heads, with the metadata of the classifier, except for its classes.

    Raises:
        ConfigError: If the classifier is of another variant, or if a name or a shape does not match.
    """
    last, has_global_token = f"stages.{len(net.variant.stages) - 1}", net.variant.pool == "global_token"

    def convert(name: str, tensor: Tensor) -> Pieces:
        key = name.removeprefix("backbone.")
        if name in HEAD_NAMES:
            return {"": HEAD}
        if has_global_token and key in (f"{last}.global_tokens", f"{last}.positions.global_tokens"):
            return {"": GLOBAL_TOKEN}
        return {key: tensor}

    saved = CheckpointMetadata.from_contents(contents)
    trained = saved.variant or named_variant(contents)
    # The backbone of a segmentor has the weights of the variant without this suffix.
    if trained not in (None, variant, variant.removesuffix("_seg")):
        raise ConfigError(f"The classifier is of variant '{trained}'. Use this variant, or another classifier.")
    weights, report = convert_tensors(
        net, state_dict_of(contents), convert, name=f"'{variant}'", initial_values=initial_values
    )
    metadata = dataclasses.replace(saved, variant=trained and variant, classes=None).to_dict()
    model = {f"{BACKBONE_PREFIX}{key}": tensor for key, tensor in weights.items()}
    return ConvertedCheckpoint("a classifier of this project", {"model": model, METADATA_KEY: metadata}, report)


def weights_of_timm(
    backbone: TimmBackbone, classifier: Mapping[str, Tensor] | None = None, *, source: str = "timm"
) -> dict[str, object]:
    """Return the contents of a checkpoint with pretrained weights of timm, or with the weights of a timm classifier.

    Args:
        classifier: See :meth:`TimmBackbone.pretrained_weights`.
        source: Where the weights come from, for errors.

    Raises:
        ConfigError: If the weights cannot be downloaded or do not match.
    """
    try:
        weights = backbone.pretrained_weights(classifier)
    except ConfigError as error:
        message = f"'{source}' has no weights for {backbone.variant}: {error} Set MODEL.WEIGHTS to a checkpoint of it."
        raise ConfigError(message) from error
    cfg = timm.get_pretrained_cfg(backbone.name)
    image = InputFormat("RGB", *(tuple(255 * value for value in values) for values in (cfg.mean, cfg.std)))
    model = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in weights.items()}
    return {"model": model, METADATA_KEY: CheckpointMetadata(variant=backbone.variant, input=image).to_dict()}


# -- Options of official checkpoints ---------------------------------------------------------------


def _vil_options(weights: Mapping[str, Tensor], variant: ViLVariant) -> dict[str, object]:
    """Return the options in which a checkpoint of ViL differs from the variant."""
    options: dict[str, object] = {}
    default = [stage.global_tokens for stage in variant.stages]
    numbers = [_global_tokens(weights, f"layer{layer}.", number) for layer, number in enumerate(default, start=1)]
    if numbers != default:
        options["global_tokens"] = numbers
    for name, tensor in weights.items():
        shared = weights.get(name.replace("_global.", "."))
        if "_global." in name and shared is not None and not torch.equal(tensor, shared):
            options["shared_projections"] = False
    return options


def _global_tokens(weights: Mapping[str, Tensor], stage: str, default: int) -> int:
    """Return the number of global tokens of a stage; the default if only the token itself is missing."""
    tokens = weights.get(f"{stage}0.cls_token")
    if tokens is not None:
        return tokens.shape[1]
    names = [name for name, tensor in weights.items() if name.startswith(stage) and tensor.numel()]
    used = any(part in name for name in names for part in ("cls_pos_embed", "g2l_relative", "_global."))
    return default if used or not names else 0


def _classifier_options(
    weights: Mapping[str, Tensor],
    variant: ViLVariant | LITVariant,
    img_size: tuple[int, int] | None,
    chunk_size: Sequence[int] | None,
) -> dict[str, object]:
    """Return the classes, image size and chunk sizes of a classifier, as requested or as its tables have them."""
    side, options = variant.classifier_img_size, {}
    if isinstance(variant, ViLVariant):
        for layer, stride in enumerate(variant.strides, start=1):
            positions = weights.get(f"layer{layer}.0.x_pos_embed")
            if positions is not None:
                side = positions.shape[1] * stride
                break
            if _has_full_attention(weights, layer) and (offsets := _num_offsets(weights, layer)):
                side = (offsets + 1) // 2 * stride
                break
        sizes = [math.ceil(max(img_size or (side,)) / stride) for stride in variant.strides]
        default = [stage.chunk_size for stage in variant.stages]
        chunks = list(chunk_size or default)
        for index, stage in enumerate(() if chunk_size else variant.stages):
            if stage.attention != "sliding_chunk":
                continue
            if _has_full_attention(weights, index + 1):
                # Two chunks are as long as the feature map, so that each token attends to all tokens.
                chunks[index] = max(stage.chunk_size, math.ceil(sizes[index] / 2))
            elif (offsets := _num_offsets(weights, index + 1)) % 4 == 3:
                chunks[index] = (offsets + 1) // 4
        options = {"chunk_size": chunks} if chunks != default else {}
    return options | {"img_size": list(img_size or (side, side)), "num_classes": len(weights["head.weight"])}


def _num_offsets(weights: Mapping[str, Tensor], layer: int) -> int:
    """Return the number of offsets along a side of a stage's relative position table; 0 without a table."""
    table = weights.get(f"layer{layer}.1.{_BIAS_TABLE}")
    return 0 if table is None else math.isqrt(len(table))


def _has_full_attention(weights: Mapping[str, Tensor], layer: int) -> bool:
    return f"layer{layer}.1.attn.qkv.weight" in weights


def _with_centered_tables(
    weights: dict[str, Tensor], variant: ViLVariant | LITVariant, options: Mapping[str, object]
) -> dict[str, Tensor]:
    """Put the tables of full attention into the middle of larger tables, for chunks.

    The offsets around them do not occur at this image size. Resized tables would have other values.
    """
    if not isinstance(variant, ViLVariant):
        return weights
    weights = dict(weights)
    chunk_sizes = options.get("chunk_size") or [stage.chunk_size for stage in variant.stages]
    stages = zip(variant.stages, variant.strides, chunk_sizes, strict=True)
    for layer, (stage, stride, chunk_size) in enumerate(stages, start=1):
        side = 2 * math.ceil(max(options["img_size"]) / stride) - 1
        if stage.attention != "sliding_chunk" or not _has_full_attention(weights, layer):
            continue
        around = (4 * chunk_size - 1 - side) // 2
        for key in [key for key in weights if key.startswith(f"layer{layer}.") and key.endswith(_BIAS_TABLE)]:
            if len(weights[key]) == side**2:
                grid = weights[key].unflatten(0, (side, side))
                weights[key] = F.pad(grid, (0, 0, *[around] * 4)).flatten(0, 1)
    return weights


# -- FPN and heads ---------------------------------------------------------------------------------


def _convert_heads(official: OfficialCheckpoint, variant: str, report: ConversionReport) -> dict[str, Tensor]:
    """Return FPN and heads with detectron2's names, and add them to the report.

    mmdetection sorts the nine anchors of RetinaNet by aspect ratio, then size; detectron2 by size, then aspect ratio.
    docs/deviations.md has the differences outside of the modules.
    """
    is_segmentor = official.project == "LIT mmsegmentation"
    layers = {} if is_segmentor else detector_layers(official.detector, variant)
    expected = {f"{layer}.{leaf}" for layer in layers.values() for leaf in ("weight", "bias")}
    heads, unexpected = {}, []
    for name, tensor in official.detector.items():
        layer, _, leaf = name.rpartition(".")
        our_name, part = f"{layers.get(layer, layer)}.{leaf}", name.partition(".")[0]
        if our_name in expected:
            if part == "bbox_head" and "retina" in layer:
                if not tensor.ndim or len(tensor) % _ANCHORS:
                    shape = tuple(tensor.shape)
                    raise ConfigError(f"'{name}' has shape {shape}. The head must have {_ANCHORS} anchors.")
                tensor = tensor.unflatten(0, (3, _ANCHORS // 3, -1)).transpose(0, 1).flatten(0, 2)
            heads[our_name] = tensor
            report.mapped[name] = our_name
        elif is_segmentor and part in _MMSEGMENTATION_PARTS:
            report.dropped[name] = f"{part} is mmsegmentation's, not detectron2's: it is randomly initialized"
        elif not is_segmentor and _CONFIG_BUFFER.fullmatch(name):
            report.dropped[name] = "the config defines it: MODEL.PIXEL_MEAN, MODEL.PIXEL_STD, MODEL.ANCHOR_GENERATOR"
        else:
            unexpected.append(name)
    check_names(f"'{variant}'", unexpected, sorted(expected - heads.keys()))
    return heads


def detector_layers(names: Collection[str], variant: str) -> dict[str, str]:
    """Return all layers of FPN and heads: mmdetection's name -> detectron2's; none if there is only a backbone.

    Args:
        names: Some parameters of the detector, with the names of mmdetection 2 or 3 or of detectron2. They show which
            heads the detector has.
        variant: The backbone's variant.
    """
    if all(_CONFIG_BUFFER.fullmatch(name) for name in names):
        return {}
    is_retinanet = any(name.startswith(("bbox_head.", "head.")) for name in names)
    has_masks = any(".mask_head." in name for name in names)
    strides = get_variant(variant).strides
    layers = dict(_RETINANET if is_retinanet else _MASK_RCNN)
    for index, stride in enumerate(strides[-3:] if is_retinanet else strides):
        layers[f"neck.lateral_convs.{index}.conv"] = f"backbone.fpn_lateral{int(math.log2(stride))}"
        layers[f"neck.fpn_convs.{index}.conv"] = f"backbone.fpn_output{int(math.log2(stride))}"
    return {name: ours for name, ours in layers.items() if has_masks or ".mask_head." not in ours}
