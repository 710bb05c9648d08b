"""Pretrained weights: official checkpoints, and classifiers of this project and of timm's scripts."""

import dataclasses
import itertools
import math
import operator
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
from backbones.checkpoint_files import check_writable, read_checkpoint, write_checkpoint
from backbones.convert import ConversionReport, OfficialCheckpoint, check_names, convert_state_dict, detect_format
from backbones.layers.position import fit_table
from backbones.lit import LITVariant
from backbones.vil import ViLStage, ViLVariant
from projects_vil.checkpoint.categories import dataset_categories
from projects_vil.checkpoint.metadata import METADATA_KEY, OFFICIAL_INPUT, CheckpointMetadata, InputFormat
from projects_vil.checkpoint.zoo import find_weights, is_zoo_name, zoo_entry
from projects_vil.config import first_of
from projects_vil.modeling import TimmBackbone

BACKBONE_PREFIX = "backbone.bottom_up.net."
_ANCHORS = 9  # per position, in the official RetinaNets

# Options that a detector's config needs besides its variant.
_CONFIG_OPTIONS = ("max_img_size", "position_interpolation", "global_tokens", "shared_projections")
_OTHER_HEADS = "{} is mmsegmentation's, not detectron2's: it is randomly initialized"
_OTHER_PARTS = ("neck", "decode_head", "auxiliary_head")
_BIAS_TABLE = "attn.local_relative_position_bias_table"
_COMPUTED_BUFFER = re.compile(r"(proposal_generator\.)?anchor_generator\.cell_anchors\.\d|pixel_(mean|std)")
_COMPUTED = "the config defines it: MODEL.PIXEL_MEAN, MODEL.PIXEL_STD, MODEL.ANCHOR_GENERATOR"

# Layers of the official detectors and of this project's: four convolutions, two fully connected layers.
_RETINANET = [f"head.{branch}.{i}" for branch in ("cls_subnet", "bbox_subnet") for i in (0, 2, 4, 6)]
_RETINANET += ["head.cls_score", "head.bbox_pred", "backbone.top_block.p6", "backbone.top_block.p7"]
_RPN = [f"proposal_generator.rpn_head.{layer}" for layer in ("conv", "objectness_logits", "anchor_deltas")]
_BOXES = ["box_head.fc1", "box_head.fc2", "box_predictor.cls_score", "box_predictor.bbox_pred"]
_MASKS = [f"mask_head.{layer}" for layer in (*(f"mask_fcn{i}" for i in range(1, 5)), "deconv", "predictor")]
_RCNN = [*_RPN, *(f"roi_heads.{layer}" for layer in (*_BOXES, *_MASKS))]

# The same layers in mmdetection, in the same order; those of a mask head may be missing.
_MMDETECTION_RETINANET = [f"bbox_head.{branch}_convs.{i}.conv" for branch in ("cls", "reg") for i in range(4)]
_MMDETECTION_RETINANET += ["bbox_head.retina_cls", "bbox_head.retina_reg"]
_MMDETECTION_RETINANET += ["neck.fpn_convs.3.conv", "neck.fpn_convs.4.conv"]
_MMDETECTION_RCNN = [f"rpn_head.{layer}" for layer in ("rpn_conv", "rpn_cls", "rpn_reg")]
_MMDETECTION_RCNN += [f"roi_head.bbox_head.{layer}" for layer in ("shared_fcs.0", "shared_fcs.1", "fc_cls", "fc_reg")]
_MMDETECTION_RCNN += [f"roi_head.mask_head.convs.{i}.conv" for i in range(4)]
_MMDETECTION_RCNN += ["roi_head.mask_head.upsample", "roi_head.mask_head.conv_logits"]


@dataclasses.dataclass
class ConvertedCheckpoint:
    """A converted checkpoint.

    Attributes:
        official: the official checkpoint.
        contents: the converted contents, for :func:`backbones.checkpoint_files.write_checkpoint`.
        options: keywords of ``create_backbone`` or ``create_classifier`` for the model that the weights are for.
        report: what happened to each name.
    """

    official: OfficialCheckpoint
    contents: dict[str, object]
    options: dict[str, object]
    report: ConversionReport

    def lines(self) -> list[str]:
        """Return the report as text: a summary, then resized, dropped and initialized tensors in groups."""
        lines = [f"{self.official.project}: {self.report.summary()}"]
        resized = Counter((re.sub(r"blocks\.\d+", "blocks.*", k), *shapes) for k, shapes in self.report.resized.items())
        for (name, old, new), number in resized.items():
            lines.append(f"resized: {name} {old} to {new}" + (f", {number} times" if number > 1 else ""))
        for action in ("dropped", "initialized"):
            names_of = defaultdict(list)
            for name, reason in getattr(self.report, action).items():
                names_of[reason].append(name)
            for reason, names in names_of.items():
                lines.append(f"{action}: {first_of(names, 1)}: {reason}")
        needed = {key: value for key, value in self.options.items() if key in _CONFIG_OPTIONS}
        if needed:
            overrides = [f"MODEL.TRANSFORMER.{key.upper()} {shlex.quote(str(value))}" for key, value in needed.items()]
            lines.append(f"load it with {' '.join(overrides)}")
        if "num_classes" in self.options:
            arguments = "".join(f", {key}={value}" for key, value in self.options.items())
            lines.append(f"load it with create_classifier({self.contents[METADATA_KEY]['variant']!r}{arguments})")
        return lines

    def as_json(self) -> dict[str, object]:
        """Return the metadata and the whole report."""
        return {
            "source": self.official.project,
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
    """Convert an official checkpoint strictly and write the result; nothing is written if anything does not fit.

    Args:
        source: ``.pth`` or ``.safetensors`` file, or a name of the model zoo.
        output: ``.pth`` or ``.safetensors`` file.
        variant: one of ``backbones.list_variants()``; None for that of a name.
        img_size: height and width in pixels of the largest image: position tables are resized for it once; None keeps
            the model's default sizes.
        classifier: convert for ``create_classifier`` instead of a detector; ``img_size`` is then its input size, None
            for the size in the model zoo, in the checkpoint's tables, or of the variant.

    Raises:
        ConfigError: if a file cannot be read or written, or the checkpoint does not fit the variant.
    """
    if variant is None and not is_zoo_name(source):
        raise ConfigError(f"model: name the variant of {source} (--model); only names of the model zoo have their own")
    entry = zoo_entry(str(source)) if is_zoo_name(source) else None
    variant = variant or entry.variant
    chunk_size = None
    if classifier and entry and variant == entry.variant:
        chunk_size = entry.chunk_size
        if entry.img_size is not None:
            img_size = img_size or (entry.img_size, entry.img_size)
    get_variant(variant)
    check_writable(output)
    source = find_weights(str(source))
    if Path(source).exists() and Path(output).exists() and Path(source).samefile(output):
        raise ConfigError(f"output {output} is the source: choose another file")
    official = detect_format(read_checkpoint(source))
    if official is None:
        raise ConfigError(
            f"{source} is in none of the official formats: no name in it is one of vision-longformer, "
            "VisionLongformerForObjectDetection, transformer-ls or LIT"
        )
    try:
        converted = convert_official(official, variant, img_size=img_size, chunk_size=chunk_size, classifier=classifier)
    except ConfigError as error:
        raise ConfigError(f"{source} ({official.project}): {error}") from error
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
    """Convert as :func:`convert_file` does, from contents that are in memory.

    Args:
        chunk_size: chunk size of each stage of a classifier; None for the sizes of the checkpoint's tables, or else of
            the variant. Absolute positions do not reveal it.
        model_options: keywords of ``create_backbone`` for an existing model; by default they are derived from the
            checkpoint.
    """
    if classifier and not official.classifier:
        raise ConfigError("classifier: the checkpoint has no classification head")
    options = _model_options(official, variant, img_size, chunk_size, classifier) if model_options is None else {}
    backbone = (
        _with_centered_tables(official.backbone, variant, options) if "img_size" in options else official.backbone
    )
    state_dict, report = convert_state_dict(
        backbone, variant, classifier=classifier, model_options=model_options or options
    )
    categories = None
    if not classifier:
        heads = _convert_heads(official, variant, report)
        state_dict = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in state_dict.items()} | heads
        # All official detectors are trained on COCO.
        coco = dataset_categories(["coco_2017_val"], 80)
        rows = {"head.cls_score.weight": _ANCHORS * 80, "roi_heads.box_predictor.cls_score.weight": 81}
        if any(name in heads and len(heads[name]) == number for name, number in rows.items()):
            categories = coco
    own = {key: value for key, value in options.items() if key in get_variant(variant).options}
    metadata = CheckpointMetadata(
        variant=variant,
        options=own,
        classes=categories and categories.names,
        category_ids=categories and categories.ids,
        input=OFFICIAL_INPUT,
    )
    sizes = {key: value for key, value in options.items() if key not in own}
    saved = metadata.to_dict() | {"source": official.project, "classifier": classifier} | sizes
    return ConvertedCheckpoint(official, {"model": state_dict, METADATA_KEY: saved}, options, report)


def is_classifier(state_dict: Mapping[str, object]) -> bool:
    """Return whether the names are those of :class:`backbones.backbone.Classifier`."""
    return any(name.removeprefix("module.").startswith("backbone.stages.") for name in state_dict)


def named_variant(contents: Mapping[str, object]) -> str | None:
    """Return the variant in the arguments that timm's training script saves, if the file has them."""
    # read_checkpoint loads a Namespace as an object with the same attributes.
    name = getattr(contents.get("args"), "model", None)
    return name if isinstance(name, str) and name in VARIANTS else None


def backbone_of_classifier(
    state_dict: Mapping[str, Tensor], name: str, backbone: Backbone
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename a classifier's state dict for ``backbone``, a model of the variant ``name``; loading it is the check.

    Position tables are resized as those of official classifiers are. Output norms, which LIT's classifiers lack, start
    as ones and zeros. The head, its norm and LIT-Ti's global token are dropped.

    Returns:
        The state dict, with unexpected names as they are, and a report in lines.
    """
    target, variant = backbone.state_dict(), get_variant(name)
    classifier_only = {f"{layer}.{leaf}" for layer in ("norm", "head") for leaf in ("weight", "bias")}
    if variant.pool == "global_token":
        last = f"stages.{len(variant.stages) - 1}"
        classifier_only |= {f"backbone.{last}.global_tokens", f"backbone.{last}.positions.global_tokens"}
    own = {full_name.removeprefix("module."): tensor for full_name, tensor in state_dict.items()}
    dropped = [key for key in own if key in classifier_only]
    converted = {key.removeprefix("backbone."): tensor for key, tensor in own.items() if key not in dropped}
    lines = [f"a classifier of this project: {len(converted)} mapped"]
    for key in [key for key in converted if key in target]:
        owner, _, leaf = key.rpartition(".")
        tensor, converted[key] = converted[key], fit_table(converted[key], backbone.get_submodule(owner), leaf)
        if tensor.shape != converted[key].shape:
            lines.append(f"resized: {key} {tuple(tensor.shape)} to {tuple(converted[key].shape)}")
    lines += [f"dropped: {', '.join(dropped)}: only a classifier has them"] if dropped else []
    norms = [key for key in target if key.startswith("output_norms.") and key not in converted]
    for key in norms:
        converted[key] = (torch.ones if key.endswith("weight") else torch.zeros)(target[key].shape)
    lines += [f"initialized: {', '.join(norms)}: a classifier has no output norms"] if norms else []
    return converted, lines


def weights_of_timm(
    backbone: TimmBackbone, classifier: Mapping[str, Tensor] | None = None, *, source: str = "timm"
) -> dict[str, object]:
    """Return timm's pretrained weights for a backbone, or those of a classifier of timm, as a checkpoint's contents.

    Args:
        classifier: see :meth:`TimmBackbone.pretrained_weights`.
        source: where they come from, for an error.

    Raises:
        ConfigError: if they cannot be downloaded or do not fit.
    """
    try:
        weights = backbone.pretrained_weights(classifier)
    except ConfigError as error:
        hint = "; name a file in MODEL.WEIGHTS, or leave out the tag to start from random weights"
        message = f"{source} has no weights for {backbone.variant}: {error}"
        raise ConfigError(message + (hint if classifier is None else "")) from error
    cfg = timm.get_pretrained_cfg(backbone.name)
    image = InputFormat("RGB", *(tuple(255 * value for value in values) for values in (cfg.mean, cfg.std)))
    model = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in weights.items()}
    return {"model": model, METADATA_KEY: CheckpointMetadata(variant=backbone.variant, input=image).to_dict()}


def _model_options(
    official: OfficialCheckpoint,
    variant: str,
    img_size: tuple[int, int] | None,
    chunk_size: Sequence[int] | None,
    classifier: bool,
) -> dict[str, object]:
    """Return the keywords for the model: requested ones, and those in which the checkpoint differs from the variant."""
    sizes = get_variant(variant)
    options = _vil_options(official.backbone, sizes) if isinstance(sizes, ViLVariant) else {}
    if classifier:
        side, head = sizes.classifier_img_size, official.backbone["head.weight"]
        if head.ndim != 2:
            raise ConfigError(f"head.weight has shape {tuple(head.shape)}, not (classes, channels)")
        if isinstance(sizes, ViLVariant):
            side = _trained_size(official.backbone, sizes) or side
            maps = _map_sizes(sizes, max(img_size or (side, side)))
            layers = zip(itertools.count(1), sizes.stages, maps)
            windows = list(chunk_size or (_window_size(official.backbone, *layer) for layer in layers))
            if windows != [stage.chunk_size for stage in sizes.stages]:
                options["chunk_size"] = windows
        return options | {"img_size": list(img_size or (side, side)), "num_classes": len(head)}
    if img_size is not None:
        # Images are landscape and portrait, and MODEL.TRANSFORMER.MAX_IMG_SIZE is one side.
        options["max_img_size"] = max(img_size)
        if isinstance(sizes, (ViLVariant, LITVariant)):
            options["position_interpolation"] = "once"
    return options


def _vil_options(backbone: Mapping[str, Tensor], variant: ViLVariant) -> dict[str, object]:
    options: dict[str, object] = {}
    default = [stage.global_tokens for stage in variant.stages]
    numbers = [_global_tokens(backbone, f"layer{index + 1}.", number) for index, number in enumerate(default)]
    if numbers != default:
        options["global_tokens"] = numbers
    for name, tensor in backbone.items():
        shared = backbone.get(name.replace("_global.", "."))
        if "_global." in name and shared is not None and not torch.equal(tensor, shared):
            options["shared_projections"] = False
    return options


def _map_sizes(variant: ViLVariant, img_size: int) -> list[int]:
    """Return the side of each stage's feature map, in tokens."""
    return [math.ceil(img_size / stride) for stride in itertools.accumulate(variant.downsample_factors, operator.mul)]


def _table_side(backbone: Mapping[str, Tensor], layer: int) -> int:
    """Return the number of offsets along a side of a stage's relative position table; 0 without a square table."""
    table = backbone.get(f"layer{layer}.1.{_BIAS_TABLE}")
    side = math.isqrt(len(table)) if table is not None and table.ndim == 2 else 0
    return side if side and side**2 == len(table) else 0


def _has_full_attention(backbone: Mapping[str, Tensor], layer: int) -> bool:
    return f"layer{layer}.1.attn.qkv.weight" in backbone


def _trained_size(backbone: Mapping[str, Tensor], variant: ViLVariant) -> int | None:
    """Return the image side in pixels that a classifier's tables are made for; None if no table depends on it."""
    for layer, stride in enumerate(itertools.accumulate(variant.downsample_factors, operator.mul), start=1):
        positions = backbone.get(f"layer{layer}.0.x_pos_embed")
        if positions is not None and positions.ndim == 3:
            return positions.shape[1] * stride
        if _has_full_attention(backbone, layer) and _table_side(backbone, layer):
            return (_table_side(backbone, layer) + 1) // 2 * stride
    return None


def _window_size(backbone: Mapping[str, Tensor], layer: int, stage: ViLStage, map_size: int) -> int:
    """Return the chunk size of a stage of a classifier, whose relative position table reveals it.

    A stage with full attention gets chunks of which two are as long as its feature map, so that all tokens see each
    other.
    """
    if stage.attention != "sliding_chunk":
        return stage.chunk_size
    if _has_full_attention(backbone, layer):
        return max(stage.chunk_size, math.ceil(map_size / 2))
    side = _table_side(backbone, layer)
    return (side + 1) // 4 if side % 4 == 3 else stage.chunk_size


def _with_centered_tables(
    backbone: Mapping[str, Tensor], name: str, options: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return a classifier's weights with the tables of full attention in the middle of larger ones, for chunks.

    The offsets around them do not occur at this image size. Resized tables would have other values.
    """
    variant, backbone = get_variant(name), dict(backbone)
    if not isinstance(variant, ViLVariant):
        return backbone
    windows = options.get("chunk_size") or [stage.chunk_size for stage in variant.stages]
    maps = _map_sizes(variant, max(options["img_size"]))
    for layer, (stage, window, map_size) in enumerate(zip(variant.stages, windows, maps, strict=True), start=1):
        side = 2 * map_size - 1
        if stage.attention != "sliding_chunk" or not _has_full_attention(backbone, layer):
            continue
        for key in [key for key in backbone if key.startswith(f"layer{layer}.") and key.endswith(_BIAS_TABLE)]:
            if backbone[key].ndim == 2 and len(backbone[key]) == side**2:
                around = (4 * window - 1 - side) // 2
                grid = backbone[key].unflatten(0, (side, side))
                backbone[key] = F.pad(grid, (0, 0, *[around] * 4)).flatten(0, 1)
    return backbone


def _global_tokens(backbone: Mapping[str, Tensor], stage: str, default: int) -> int:
    """Return a stage's number of global tokens in the checkpoint; the default where only the token is missing."""
    tokens = backbone.get(f"{stage}0.cls_token")
    if tokens is not None:
        return tokens.shape[1] if tokens.ndim == 3 else default
    names = [name for name, tensor in backbone.items() if name.startswith(stage) and tensor.numel()]
    used = any(part in name for name in names for part in ("cls_pos_embed", "g2l_relative", "_global."))
    return default if used or not names else 0


def _convert_heads(official: OfficialCheckpoint, variant: str, report: ConversionReport) -> dict[str, Tensor]:
    """Return FPN and heads with detectron2's names, and add them to the report."""
    detector, heads, unexplained = official.detector, {}, []
    is_segmentor, ours = official.project == "LIT mmsegmentation", {name: name for name in detector}
    if official.project == "LIT mmdetection":
        detector, ours = _from_mmdetection(detector)
    expected = set() if is_segmentor else expected_heads(ours.values(), variant)
    for name, tensor in detector.items():
        part = name.partition(".")[0]
        if ours[name] in expected:
            heads[ours[name]] = tensor
            report.mapped[name] = ours[name]
        elif is_segmentor and part in _OTHER_PARTS:
            report.dropped[name] = _OTHER_HEADS.format(part)
        elif not is_segmentor and _COMPUTED_BUFFER.fullmatch(name):
            report.dropped[name] = _COMPUTED
        else:
            unexplained.append(name)
    unfilled = sorted(expected - heads.keys())
    check_names(f"'{variant}'", unexplained, unfilled)
    return heads


def _from_mmdetection(detector: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return FPN and heads of mmdetection 2 for detectron2's modules, by mmdetection's names, and our names for them.

    The modules compute the same (docs/deviations.md has what differs around them), except that a position of RetinaNet
    has its nine anchors by aspect ratio, then size, and detectron2's by size, then aspect ratio.
    """
    retinanet = any(name.startswith("bbox_head.") for name in detector)
    pair = (_MMDETECTION_RETINANET, _RETINANET) if retinanet else (_MMDETECTION_RCNN, _RCNN)
    layers = dict(zip(*pair, strict=True))
    for index, level in enumerate(range(3 if retinanet else 2, 6)):
        layers[f"neck.lateral_convs.{index}.conv"] = f"backbone.fpn_lateral{level}"
        layers[f"neck.fpn_convs.{index}.conv"] = f"backbone.fpn_output{level}"
    converted, ours = dict(detector), {}
    for name, tensor in detector.items():
        layer, _, leaf = name.rpartition(".")
        ours[name] = f"{layers.get(layer, layer)}.{leaf}"
        if layer in ("bbox_head.retina_cls", "bbox_head.retina_reg"):
            if not tensor.ndim or len(tensor) % _ANCHORS:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)}: its rows are not for {_ANCHORS} anchors")
            converted[name] = tensor.unflatten(0, (3, _ANCHORS // 3, -1)).transpose(0, 1).flatten(0, 2)
    return converted, ours


def expected_heads(detector: Collection[str], variant: str) -> set[str]:
    """Return the names of FPN and heads of an official detector, from some of them; none for only a backbone."""
    if all(_COMPUTED_BUFFER.fullmatch(name) for name in detector):
        return set()
    retinanet = any(name.startswith("head.") for name in detector)
    strides = list(itertools.accumulate(get_variant(variant).downsample_factors, operator.mul))
    levels = [int(math.log2(stride)) for stride in (strides[-3:] if retinanet else strides)]
    layers = [f"backbone.fpn_{conv}{level}" for level in levels for conv in ("lateral", "output")]
    has_masks = any(name.startswith("roi_heads.mask_head.") for name in detector)
    layers += _RETINANET if retinanet else [layer for layer in _RCNN if has_masks or ".mask_head." not in layer]
    return {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")}
