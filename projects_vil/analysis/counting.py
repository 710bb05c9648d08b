"""Parameters and multiply-adds of variants and detectors, next to the figures of the papers."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.analysis import parameter_count
from tabulate import tabulate
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, flop_registry, register_flop_formula

from backbones import ConfigError, create_backbone, create_classifier, list_variants
from backbones.attention.efficient import PerformerAttention
from backbones.build import VARIANTS, get_variant
from backbones.errors import closest
from backbones.vil import ViLVariant
from projects_vil.config import detector_name, with_overrides
from projects_vil.modeling import TimmBackbone

# {"classifier" or detector: {variant: [parameters in millions, 1e9 multiply-adds or None]}}
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
# 800 x 1333, padded to a multiple of 32.
_DETECTOR_SIZE = (800, 1344)
# Operators without a formula in PyTorch: in-place baddbmm and, before torch 2.15, CPU attention.
_SAME_FORMULA = {
    "baddbmm_": "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}
# Parts of the names of operators, and their types. The others are matrix products.
_OPERATOR_TYPES = {"attention": "attention", "conv": "convolution"}
for _operator, _known in _SAME_FORMULA.items():
    flop_registry.setdefault(getattr(torch.ops.aten, _operator), flop_registry[getattr(torch.ops.aten, _known)])


def count_variants(prefixes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Count the variants that start with one of the prefixes, sorted by name. Without prefixes, count all variants.

    Raises:
        ConfigError: If no variant starts with a prefix.
    """
    names: set[str] = set()
    for prefix in prefixes or ("",):
        matches = list_variants(prefix)
        if not matches:
            hint = closest(prefix, VARIANTS) or ". Leave it out to count all variants."
            raise ConfigError(f"No variant starts with {prefix!r}{hint}")
        names.update(matches)
    return [count_variant(name) for name in sorted(names)]


def count_variant(name: str) -> dict[str, Any]:
    """Count the parameters and multiply-adds of a variant on the meta device.

    Returns:
        - ``parameters`` and ``flops`` of the classifier with 1000 classes at ``img_size`` x ``img_size``;
        - ``backbone_flops`` of the backbone at 800 x 1344, or ``None`` if the variant is only a classifier;
        - ``published_parameters`` in millions and ``published_flops`` in 1e9, as printed in the paper, or ``None``.
    """
    img_size, classifier = get_variant(name).classifier_img_size, meta_classifier(name)
    published = PUBLISHED["classifier"].get(name, (None, None))
    backbone_flops = None
    with contextlib.suppress(ConfigError), torch.device("meta"):
        backbone_flops = sum(count_flops(create_backbone(name), torch.empty(1, 3, *_DETECTOR_SIZE)).values())
    return {
        "name": name,
        "img_size": img_size,
        "parameters": count_classifier_parameters(classifier),
        "published_parameters": published[0],
        "flops": sum(count_flops(classifier, torch.empty(1, 3, img_size, img_size, device="meta")).values()),
        "published_flops": published[1],
        "backbone_flops": backbone_flops,
    }


def count_detector(cfg: CfgNode, name: str, *, size: tuple[int, int] = (800, 1333), with_flops: bool = True) -> dict:
    """Count the parameters of a detector, and its multiply-adds on one image.

    The image is dark noise and the weights are random, so that there are few detections.

    Args:
        cfg: The config of the detector.
        name: A name for the row.
        size: Height and width of the image in pixels.
        with_flops: Whether to count multiply-adds.

    Returns:
        - ``parameters`` by part, and their ``total``;
        - ``as_published``: the total as the paper counts it. For ViL this means absolute positions for 1333 pixels,
          and the unused classification head (1000 classes) and norm of the official detectors;
        - ``classifier``: the parameters of the paper's classifier, ``None`` for timm models;
        - ``flops`` and ``flops_by_operator``;
        - ``published_parameters``, ``published_classifier`` in millions and ``published_flops`` in 1e9, as printed in
          the paper, or ``None``.
    """
    # Counting parameters needs no memory for weights.
    cfg = with_overrides(cfg, {"MODEL.DEVICE": "cpu" if with_flops else "meta"})
    with torch.device(cfg.MODEL.DEVICE):
        model = build_model(cfg).eval()
    numbers = parameter_count(model)
    parts = {part: numbers[part] for part, _ in model.named_children() if numbers[part]}
    parts["backbone"] = numbers["backbone.bottom_up"]
    parts["fpn"] = numbers["backbone"] - parts["backbone"]
    total = as_published = sum(parts.values())
    variant_name = cfg.MODEL.TRANSFORMER.VARIANT.removesuffix("_rpb")
    is_timm = isinstance(model.backbone.bottom_up, TimmBackbone)
    variant = None if is_timm else get_variant(variant_name)
    classifier = None if is_timm else meta_classifier(variant_name)
    if isinstance(variant, ViLVariant) and not variant.relative_bias:
        with torch.device("meta"):
            options = model.backbone.bottom_up.variant_options
            backbone = create_backbone(variant_name, max_img_size=1333, **options)
        extra = sum(parameter_count(module)[""] for module in (backbone, classifier.norm, classifier.head))
        as_published += extra - parts["backbone"]
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(0)) * 60
    by_operator = count_flops(model, [{"image": image}]) if with_flops else {}
    published = PUBLISHED.get(detector_name(cfg), {}).get(variant_name, (None, None))
    return {
        "name": name,
        "parameters": parts,
        "total": total,
        "as_published": as_published,
        "published_parameters": published[0],
        "classifier": classifier and count_classifier_parameters(classifier),
        "published_classifier": PUBLISHED["classifier"].get(variant_name, (None, None))[0],
        "flops": sum(by_operator.values()) if with_flops else None,
        "flops_by_operator": by_operator,
        "published_flops": published[1],
        "size": size,
    }


def meta_classifier(name: str) -> nn.Module:
    """Return the classifier of a variant in the paper, on the meta device."""
    with torch.device("meta"):
        return create_classifier(name, img_size=get_variant(name).classifier_img_size)


def count_classifier_parameters(classifier: nn.Module) -> int:
    """Count parameters as the ViL paper does, including Performer's fixed random features."""
    features = [m.features.numel() for m in classifier.modules() if isinstance(m, PerformerAttention)]
    return parameter_count(classifier)[""] + sum(features)


def count_flops(model: nn.Module, *inputs: Any) -> dict[str, int]:
    """Count the multiply-adds of a model by operator type, in eval mode.

    Matrix products and convolutions are counted as computed, including the padding keys, copied global tokens and mask
    channel of attention. Biases, norms, activations, softmax and the interpolation of deformable convolution are not
    counted.

    Args:
        model: A model, which may be on the meta device.
        inputs: The arguments of its forward.
    """
    model.eval().requires_grad_(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    counts: Counter[str] = Counter()
    for operator, flops in counter.get_flop_counts().get("Global", {}).items():
        # The counter counts a multiply-add as two operations.
        kind = next((kind for part, kind in _OPERATOR_TYPES.items() if part in str(operator)), "matmul")
        counts[kind] += flops // 2
    return dict(counts)


def format_variants(counts: Sequence[dict[str, Any]]) -> str:
    """Format the result of :func:`count_variants` as a table. Differences are ours minus the paper's."""
    headers = ["variant", "params M", "paper", "diff", "1e9 mult-adds", "paper", "diff", "800 x 1333"]
    rows = []
    for each in counts:
        row = [each["name"]]
        for key, unit in (("parameters", 1e6), ("flops", 1e9)):
            count, paper = each[key] / unit, each[f"published_{key}"]
            row += [count, paper, None if paper is None else count - paper]
        rows.append([*row, each["backbone_flops"] and each["backbone_flops"] / 1e9])
    return tabulate(rows, headers, floatfmt=("", ".2f", "g", "+.2f", ".2f", "g", "+.2f", ".1f"), missingval="-")


def format_detectors(counts: Sequence[dict[str, Any]]) -> str:
    """Format results of :func:`count_detector` as a table. A single detector is also split by part and operator."""
    headers = ["config", "params M", "as published", "paper", "classifier M", "paper", "1e9 mult-adds", "paper"]
    rows = [
        [
            *(each["name"], each["total"] / 1e6, each["as_published"] / 1e6, each["published_parameters"]),
            *(each["classifier"] and each["classifier"] / 1e6, each["published_classifier"]),
            *(each["flops"] and each["flops"] / 1e9, each["published_flops"]),
        ]
        for each in counts
    ]
    tables = [tabulate(rows, headers, floatfmt=("", ".2f", ".2f", "g", ".2f", "g", ".1f", "g"), missingval="-")]
    if len(counts) == 1:
        for what, key, unit in (("part", "parameters", 1e6), ("operator", "flops_by_operator", 1e9)):
            rows = [(name, number / unit) for name, number in Counter(counts[0][key]).most_common()]
            tables += [tabulate(rows, [what, "M" if unit == 1e6 else "1e9 mult-adds"], floatfmt=".3f")] if rows else []
    return "\n\n".join(tables)


@register_flop_formula(torch.ops.torchvision.deform_conv2d)
def _deform_conv_flops(image: list[int], weight: list[int], *_: Any, out_shape: list[int], **__: Any) -> int:
    """Return twice the multiply-adds of a convolution, from the shapes of its input, weight and output."""
    return conv_flop_count(image, weight, out_shape)
