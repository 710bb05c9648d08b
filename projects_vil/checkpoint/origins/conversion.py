"""Official checkpoints into files that ``MODEL.WEIGHTS`` takes: backbones, and heads where they are detectron2's."""

import dataclasses
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from backbones import InputError
from backbones.convert import ConversionReport, OfficialCheckpoint, convert_state_dict, describe_mismatch, recognise
from backbones.utils.files import check_writable, read_checkpoint, write_checkpoint
from backbones.variants import LITVariant, ViLStage, ViLVariant, get_variant
from projects_vil.checkpoint.categories import Categories, dataset_categories
from projects_vil.checkpoint.provenance import OFFICIAL_INPUT, PROVENANCE_KEY, Provenance

BACKBONE_PREFIX = "backbone.bottom_up.net."
_COCO, _COCO_CLASSES = "coco_2017_val", 80
_ANCHORS_OF_A_PLACE = 9

# Of the options that a model may need besides its name.
_CONFIG_KEYS = {
    key: f"MODEL.TRANSFORMER.{key.upper()}"
    for key in ("max_img_size", "position_resizing", "global_tokens", "shared_projections")
}
_OTHER_HEADS = "{} is mmdetection's or mmsegmentation's, not detectron2's: it starts anew"
_OTHER_PARTS = ("neck", "bbox_head", "rpn_head", "roi_head", "decode_head", "auxiliary_head")
_COMPUTED_BUFFER = re.compile(r"(proposal_generator\.)?anchor_generator\.cell_anchors\.\d|pixel_(mean|std)")
_COMPUTED = "the config says it: MODEL.PIXEL_MEAN, MODEL.PIXEL_STD, MODEL.ANCHOR_GENERATOR"

# Of the official detectors, as of this project's: four convolutions, two fully connected layers.
_LEAVES = ("weight", "bias")
_RETINANET = [f"head.{branch}.{i}" for branch in ("cls_subnet", "bbox_subnet") for i in (0, 2, 4, 6)]
_RETINANET += ["head.cls_score", "head.bbox_pred", "backbone.top_block.p6", "backbone.top_block.p7"]
_RPN = [f"proposal_generator.rpn_head.{layer}" for layer in ("conv", "objectness_logits", "anchor_deltas")]
_BOXES = ["box_head.fc1", "box_head.fc2", "box_predictor.cls_score", "box_predictor.bbox_pred"]
_MASKS = [f"mask_head.{layer}" for layer in (*(f"mask_fcn{i}" for i in range(1, 5)), "deconv", "predictor")]


@dataclasses.dataclass
class Conversion:
    """A converted checkpoint.

    Attributes:
        official: what it was.
        contents: what :func:`backbones.utils.files.write_checkpoint` takes.
        options: the keywords of ``create_backbone`` or ``create_classifier`` for the model that takes it.
        report: what became of every name: official names without the wrappers that the file has round them.
    """

    official: OfficialCheckpoint
    contents: dict[str, object]
    options: dict[str, object]
    report: ConversionReport

    def lines(self) -> list[str]:
        """The report, a line for each kind of thing that happened."""
        lines = [f"{self.official.kind}: {self.report.summary()}"]
        resized = Counter((re.sub(r"blocks\.\d+", "blocks.*", k), *shapes) for k, shapes in self.report.resized.items())
        lines += [f"resized: {name} {old} to {new}" + _times(n) for (name, old, new), n in resized.items()]
        for what in ("dropped", "initialised"):
            reasons: dict[str, list[str]] = {}
            for name, reason in getattr(self.report, what).items():
                reasons.setdefault(reason, []).append(name)
            for reason, names in reasons.items():
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{what}: {names[0]}{more}: {reason}")
        if keys := [
            f"{_CONFIG_KEYS[key]} {shlex.quote(str(value))}"
            for key, value in self.options.items()
            if key in _CONFIG_KEYS
        ]:
            lines.append(f"to be loaded with {' '.join(keys)}")
        return lines

    def as_json(self) -> dict[str, object]:
        """Everything, for ``--json``."""
        return {
            "source": self.official.kind,
            **{key: value for key, value in self.contents.items() if key != "model"},
            "summary": self.report.summary(),
            **dataclasses.asdict(self.report),
        }


def convert_file(
    source: str | Path,
    output: str | Path,
    variant: str,
    *,
    img_size: tuple[int, int] | None = None,
    classifier: bool = False,
) -> Conversion:
    """Read an official checkpoint, convert it strictly and write it; nothing is written where something is wrong.

    Args:
        source: ``.pth`` or ``.safetensors``.
        output: the same.
        variant: of ``backbones.list_variants()``.
        img_size: height and width in pixels of the largest image, for tables that are resized once, now; None for
            tables as the model has them by default.
        classifier: for ``create_classifier`` in the place of a detector; ``img_size`` is its input's.

    Raises:
        InputError: for files that cannot be read or written, and checkpoints that do not fit.
    """
    get_variant(variant)
    check_writable(output)
    if Path(source).exists() and Path(output).exists() and Path(source).samefile(output):
        raise InputError(f"{output} is the file to convert: name another output")
    official = recognise(read_checkpoint(source))
    if official is None:
        raise InputError(
            f"{source} is in none of the official formats: no name in it is one of vision-longformer, "
            "VisionLongformerForObjectDetection, transformer-ls or LIT"
        )
    try:
        converted = convert_official(official, variant, img_size=img_size, classifier=classifier)
    except InputError as error:
        raise InputError(f"{source} ({official.kind}): {error}") from error
    write_checkpoint(output, converted.contents)
    return converted


def convert_official(
    official: OfficialCheckpoint,
    variant: str,
    *,
    img_size: tuple[int, int] | None = None,
    classifier: bool = False,
    model_options: Mapping[str, object] | None = None,
) -> Conversion:
    """As :func:`convert_file`, from what :func:`backbones.convert.recognise` made of a file.

    ``model_options`` are the keywords of ``create_backbone`` for a model that is there already.
    """
    if classifier and not official.classifier:
        raise InputError("--classifier needs a classifier's checkpoint, and this one has no classification head")
    options = _model_options(official, variant, img_size, classifier) if model_options is None else {}
    state_dict, report = convert_state_dict(
        official.backbone, variant, classifier=classifier, model_options=model_options or options
    )
    categories = None
    if not classifier:
        state_dict = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in state_dict.items()}
        heads = _convert_heads(official, variant, report)
        state_dict |= heads
        categories = _coco_categories(heads)
    own = {key: value for key, value in options.items() if key in get_variant(variant).options}
    provenance = Provenance(variant=variant, options=own, input_format=OFFICIAL_INPUT)
    if categories is not None:
        provenance = dataclasses.replace(provenance, classes=categories.names, category_ids=categories.ids)
    sizes = {key: value for key, value in options.items() if key not in own}
    contents = {
        "model": state_dict,
        PROVENANCE_KEY: provenance.to_dict() | {"source": official.kind, "classifier": classifier} | sizes,
    }
    return Conversion(official, contents, options, report)


def _model_options(
    official: OfficialCheckpoint, variant: str, img_size: tuple[int, int] | None, classifier: bool
) -> dict[str, object]:
    """The keywords for the model: what is asked for, and what the checkpoint has in another way than the variant."""
    sizes = get_variant(variant)
    options = _options_of_vil(official.backbone, sizes) if isinstance(sizes, ViLVariant) else {}
    if classifier:
        side = sizes.classifier_img_size
        head = official.backbone["head.weight"]
        if head.ndim != 2:
            raise InputError(f"head.weight has shape {tuple(head.shape)}: it is classes by channels")
        size, num_classes = list(img_size or (side, side)), len(head)
        if isinstance(sizes, ViLVariant):
            windows = [_window(official.backbone, index, stage) for index, stage in enumerate(sizes.stages)]
            if windows != [stage.window_size for stage in sizes.stages]:
                options["window_size"] = windows
        return options | {"img_size": size, "num_classes": num_classes}
    if img_size is not None:
        # Images lie and stand, and MODEL.TRANSFORMER.MAX_IMG_SIZE is one side.
        options["max_img_size"] = max(img_size)
        if isinstance(sizes, (ViLVariant, LITVariant)):
            options["position_resizing"] = "load"
    return options


def _options_of_vil(backbone: Mapping[str, Tensor], variant: ViLVariant) -> dict[str, object]:
    options: dict[str, object] = {}
    own = [stage.global_tokens for stage in variant.stages]
    numbers = [_global_tokens(backbone, f"layer{index + 1}.", number) for index, number in enumerate(own)]
    if numbers != own:
        options["global_tokens"] = numbers
    for name, tensor in backbone.items():
        shared = backbone.get(name.replace("_global.", "."))
        if "_global." in name and shared is not None and not torch.equal(tensor, shared):
            options["shared_projections"] = False
    return options


def _window(backbone: Mapping[str, Tensor], index: int, stage: ViLStage) -> int:
    """The side of a chunk, by the table of relative bias where the checkpoint's stage has sliding chunks."""
    layer = f"layer{index + 1}.1.attn"
    table = backbone.get(f"{layer}.local_relative_position_bias_table")
    if stage.attention != "sliding_chunk" or table is None or f"{layer}.query.weight" not in backbone:
        return stage.window_size
    side = math.isqrt(len(table)) if table.ndim == 2 else 0
    return (side + 1) // 4 if side**2 == len(table) and side % 4 == 3 else stage.window_size


def _global_tokens(backbone: Mapping[str, Tensor], stage: str, own: int) -> int:
    """How many a stage of the checkpoint has; the variant's own number where its token was lost."""
    tokens = backbone.get(f"{stage}0.cls_token")
    if tokens is not None:
        return tokens.shape[1] if tokens.ndim == 3 else own
    names = [name for name, tensor in backbone.items() if name.startswith(stage) and tensor.numel()]
    traces = any(part in name for name in names for part in ("cls_pos_embed", "g2l_relative", "_global."))
    return own if traces or not names else 0


def _convert_heads(official: OfficialCheckpoint, variant: str, report: ConversionReport) -> dict[str, Tensor]:
    """FPN and heads under this project's names, which are detectron2's; the report is completed."""
    heads, unexplained = {}, []
    if official.kind.startswith("LIT"):
        for name in official.detector:
            part = name.partition(".")[0]
            if part in _OTHER_PARTS:
                report.dropped[name] = _OTHER_HEADS.format(part)
            else:
                unexplained.append(name)
        expected = set()
    else:
        expected = expected_heads(official.detector, variant)
        for name, tensor in official.detector.items():
            if name in expected:
                heads[name] = tensor
                report.mapped[name] = name
            elif _COMPUTED_BUFFER.fullmatch(name):
                report.dropped[name] = _COMPUTED
            else:
                unexplained.append(name)
    unfilled = sorted(expected - heads.keys())
    if unexplained or unfilled:
        raise InputError(describe_mismatch(variant, unexplained, unfilled))
    return heads


def expected_heads(detector: Mapping[str, Tensor], variant: str) -> set[str]:
    """The names of FPN and heads of the official detector that has some of them; none for a backbone alone."""
    if all(_COMPUTED_BUFFER.fullmatch(name) for name in detector):
        return set()
    retinanet = any(name.startswith("head.") for name in detector)
    strides = _strides(variant)
    levels = [int(math.log2(stride)) for stride in (strides[-3:] if retinanet else strides)]
    layers = [f"backbone.fpn_{kind}{level}" for level in levels for kind in ("lateral", "output")]
    if retinanet:
        layers += _RETINANET
    else:
        masks = _MASKS if any(name.startswith("roi_heads.mask_head.") for name in detector) else []
        layers += [*_RPN, *(f"roi_heads.{layer}" for layer in (*_BOXES, *masks))]
    return {f"{layer}.{leaf}" for layer in layers for leaf in _LEAVES}


def _strides(variant: str) -> list[int]:
    strides, stride = [], 1
    for stage in get_variant(variant).stages:
        stride *= stage.patch_size
        strides.append(stride)
    return strides


def _coco_categories(heads: Mapping[str, Tensor]) -> Categories | None:
    """COCO's where a predictor has as many classes: all official detectors are COCO's."""
    coco = dataset_categories([_COCO], _COCO_CLASSES)
    rows = {
        "head.cls_score.weight": _ANCHORS_OF_A_PLACE * _COCO_CLASSES,
        "roi_heads.box_predictor.cls_score.weight": _COCO_CLASSES + 1,
    }
    return coco if any(name in heads and len(heads[name]) == number for name, number in rows.items()) else None


def _times(number: int) -> str:
    return f", {number} times" if number > 1 else ""
