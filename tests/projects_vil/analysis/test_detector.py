"""Counts of detectors: parts that add up, the papers' digits, and attention among the FLOPs."""

import dataclasses
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from backbones.layers.token_merging import DeformableTokenMerging
from projects_vil import load_config
from projects_vil.analysis import analyze, as_json, format_analyses
from projects_vil.analysis.detector import Analysis, count_flops, parameters_by_part
from projects_vil.analysis.published import PUBLISHED
from tests.projects_vil.helpers import ROOT, small_config
from tests.selection import slow_except

# ViL Tables 6 (RetinaNet) and 7 (Mask R-CNN): parameters in millions as printed, and 1e9 multiply-adds.
TABLES = {
    ("retinanet", "vil_tiny"): ("16.64", 171.91),
    ("retinanet", "vil_small"): ("35.68", 252.21),
    ("retinanet", "vil_medium_deep"): ("50.77", 338.93),
    ("retinanet", "vil_base_deep"): ("66.74", 443.0),
    ("mask_rcnn", "vil_tiny"): ("26.9", 94.3),
    ("mask_rcnn", "vil_small"): ("45.0", 174.3),
    ("mask_rcnn", "vil_medium_deep"): ("60.1", 261.1),
    ("mask_rcnn", "vil_base_deep"): ("76.1", 365.1),
}
# ViL Table 8, all Mask R-CNN of size small.
TABLE_8 = {
    "sra64": ("73.3", 153.9),
    "sra32": ("51.5", 176.6),
    "partial_sra32": ("46.8", 159.0),
    "global": ("45.2", 177.1),
    "partial_global": ("45.1", 158.5),
    "performer": ("45.0", 160.7),
    "partial_performer": ("45.0", 160.7),
    "partial_vil": ("45.0", 164.4),
}
# LIT Tables 6 and 7, whole millions.
LIT = {("retinanet", "ti"): 30, ("retinanet", "s"): 39, ("mask_rcnn", "ti"): 40, ("mask_rcnn", "s"): 48}
KINDS = {"retinanet": "RetinaNet", "mask_rcnn": "Mask R-CNN"}
# ViL Table 4.
CLASSIFIERS = {"vil_tiny": "6.7", "vil_small": "24.6", "vil_medium_deep": "39.7", "vil_base_deep": "55.7"}


@pytest.mark.parametrize("detector, size", TABLES)
def test_parameters_agree_with_the_papers_digits(detector, size):
    cfg = load_config(ROOT / f"configs/{detector}/{size}_1x.yaml")
    result = analyze(cfg, "a name", with_flops=False)
    printed, flops = TABLES[detector, size]
    decimals = len(printed.partition(".")[2])
    assert f"{result.as_published / 1e6:.{decimals}f}" == printed
    assert (result.published_parameters, result.published_flops) == (float(printed), flops)
    assert f"{result.classifier / 1e6:.1f}" == CLASSIFIERS[size]
    assert result.published_classifier == float(CLASSIFIERS[size])
    assert (result.name, result.flops, result.flops_by_operator) == ("a name", None, {})
    assert sum(result.parameters.values()) == result.total < result.as_published


def mask_rcnn(name: str, *overrides: str) -> CfgNode:
    return load_config(ROOT / "configs/mask_rcnn/vil_small_1x.yaml", ["MODEL.TRANSFORMER.NAME", name, *overrides])


@pytest.mark.parametrize("mechanism", slow_except(TABLE_8, list(TABLE_8)[:2]))
def test_parameters_of_other_mechanisms_agree_with_table_8(mechanism):
    printed, flops = TABLE_8[mechanism]
    result = analyze(mask_rcnn(f"{mechanism}_small"), "a name", with_flops=False)
    assert (result.published_parameters, result.published_flops) == (float(printed), flops)
    # 45.24 for both kinds of global memory, printed 45.2 and 45.1
    off = 0.1 if mechanism == "partial_global" else 0
    assert result.as_published / 1e6 == pytest.approx(float(printed) + off, abs=0.05)


@pytest.mark.parametrize("detector, size", LIT)
def test_parameters_of_lit_are_the_total(detector, size):
    cfg = load_config(ROOT / f"configs/{detector}/vil_tiny_1x.yaml", ["MODEL.TRANSFORMER.NAME", f"lit_{size}"])
    result = analyze(cfg, "a name", with_flops=False)
    assert result.as_published == result.total
    assert round(result.total / 1e6) == result.published_parameters == LIT[detector, size]
    assert result.published_flops is None


@pytest.mark.parametrize("name, decimals", [("ls_tiny", None), ("ls_medium", 1)])
def test_long_short_has_no_absolute_twin(name, decimals):
    result = analyze(mask_rcnn(name), "a name", with_flops=False)
    assert result.as_published == result.total and result.published_parameters is None
    assert result.published_classifier == (None if decimals is None else round(result.classifier / 1e6, decimals))


@pytest.mark.parametrize("overrides", [["MODEL.ROI_HEADS.NAME", "CascadeROIHeads"], ["MODEL.MASK_ON", "False"]])
def test_figures_of_mask_rcnn_are_of_no_other(overrides):
    agnostic = ["MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", "True"]
    cfg = load_config(ROOT / "configs/mask_rcnn/vil_tiny_1x.yaml", [*agnostic, *overrides])
    assert analyze(cfg, "a name", with_flops=False).published_parameters is None
    point_rend = load_config(ROOT / "configs/projects/point_rend_vil_tiny_1x.yaml")
    assert analyze(point_rend, "a name", with_flops=False).published_parameters is None


def test_nothing_else_is_said_to_be_published():
    tables = {(KINDS[detector], size) for detector, size in TABLES}
    tables |= {("Mask R-CNN", f"{mechanism}_small") for mechanism in TABLE_8}
    tables |= {(KINDS[detector], f"lit_{size}") for detector, size in LIT}
    tables |= {("SemanticSegmentor", "lit_ti"), ("SemanticSegmentor", "lit_s_seg")}
    assert PUBLISHED.keys() == tables


@pytest.mark.parametrize(
    "detector, parts",
    [
        ("retinanet", {"backbone", "fpn", "head"}),
        ("mask_rcnn", {"backbone", "fpn", "proposal_generator", "roi_heads"}),
    ],
)
def test_parts_add_up_to_the_model(detector, parts):
    model = build_model(small_config(detector))
    counts = parameters_by_part(model)
    assert counts.keys() == parts
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts["backbone"] == sum(p.numel() for p in model.backbone.bottom_up.parameters())
    assert counts["fpn"] == sum(p.numel() for p in model.backbone.parameters()) - counts["backbone"]


def test_what_the_paper_counts_more():
    """Absolute positions in place of relative bias; a head of 1000 classes; a norm."""
    rpb = analyze(small_config(), "rpb", with_flops=False)
    absolute_config = small_config("retinanet", "MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1")
    absolute = analyze(absolute_config, "absolute", with_flops=False)
    assert rpb.as_published == absolute.as_published
    assert absolute.as_published - absolute.total == 1000 * 384 + 1000 + 2 * 384
    # A row and a column for 1344 pixels a side; a position for each of three global tokens.
    tables = sum(2 * (1344 // stride) * dim // 2 for stride, dim in [(4, 48), (8, 96), (16, 192), (32, 384)])
    biases = 27**2 * (1 + 3 + 3 * 3 + 6)
    to_global = 1 + 3 + 3 * 3
    from_global = 2 * 2 * 3
    assert absolute.total - rpb.total == tables + 48 + 96 + 192 - biases - to_global - from_global


# -- FLOPs -----------------------------------------------------------------------------------------


class OneAttention(nn.Module):
    """A detector of nothing but attention: 5 queries for each row of the image, 3 more keys, 2 heads."""

    def forward(self, batch: list[dict]) -> torch.Tensor:
        height, width = batch[0]["image"].shape[1:]
        query = torch.ones(1, 2, 5 * height, 6)
        key, value = torch.ones(1, 2, 5 * height + 3, 6), torch.ones(1, 2, 5 * height + 3, 4)
        return F.scaled_dot_product_attention(query, key, value) * width


class OneMerging(nn.Module):
    """A detector of nothing but deformable token merging, to 10 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.merging = DeformableTokenMerging(3, 10)

    def forward(self, batch: list[dict]) -> torch.Tensor:
        return self.merging(batch[0]["image"][None])


def test_attention_is_counted_as_two_products():
    flops = count_flops(OneAttention(), (8, 12))
    queries, keys = 5 * 8, 5 * 8 + 3
    assert flops["attention"] == 2 * queries * keys * 6 + 2 * queries * keys * 4


def test_attention_of_a_detector_equals_a_hand_count():
    """On maps of whole chunks; the keys of padding and the channel that marks them add a few per cent."""
    height, width, window = 224, 448, 7
    model = build_model(small_config()).eval()
    flops = count_flops(model, (height, width))
    expected = 0
    for depth, dim, stride, num_global in [(1, 48, 4, 1), (1, 96, 8, 1), (3, 192, 16, 1), (1, 384, 32, 0)]:
        tokens = (height // stride) * (width // stride)
        expected += depth * 2 * tokens * (9 * window**2 + num_global) * dim
        # Global tokens look at everything, but for those of a stage's last block, which the next stage drops.
        expected += (depth - 1) * 2 * num_global * (tokens + num_global) * dim
    assert expected <= flops["attention"] <= 1.1 * expected
    assert flops["linear"] > flops["attention"] > 0 and flops["conv"] > 0


def test_deformable_merging_of_a_detector_is_counted():
    # An odd height is padded: 5 x 6 merged tokens of 2 x 2 with 3 channels, to 8 offsets and to 10 channels
    assert count_flops(OneMerging().eval(), (9, 12))["conv"] == 5 * 6 * (2 * 2 * 3) * (8 + 10)


def test_counting_leaves_the_loggers_as_they_are(monkeypatch):
    loggers = [logging.getLogger(name) for name in ("fvcore", "fvcore.nn.jit_analysis", "detectron2")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.INFO)
    before = [logger.level for logger in loggers]
    count_flops(OneAttention(), (8, 12))
    assert [logger.level for logger in loggers] == before


@pytest.mark.slow
def test_flops_of_an_analysis_add_up():
    result = analyze(small_config(), "small", size=(64, 96))
    assert result.size == (64, 96)
    assert result.flops == sum(result.flops_by_operator.values())
    assert {"attention", "linear", "conv"} <= result.flops_by_operator.keys()
    assert result.published_flops is None and result.published_parameters is None


# -- output ----------------------------------------------------------------------------------------


def counts(**changes) -> Analysis:
    analysis = Analysis(
        name="configs/a.yaml",
        parameters={"backbone": 6_000_000, "fpn": 1_500_000},
        total=7_500_000,
        as_published=8_250_000,
        published_parameters=8.3,
        classifier=6_710_000,
        published_classifier=6.7,
        flops=3_000_000_000,
        flops_by_operator={"conv": 1_000_000_000, "attention": 2_000_000_000},
        published_flops=None,
        size=(800, 1333),
    )
    return dataclasses.replace(analysis, **changes)


def test_one_detector_as_text():
    text = format_analyses([counts()])
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert text.splitlines()[0] == "configs/a.yaml"
    assert "6.000 M" in lines["backbone"] and "1.500 M" in lines["fpn"]
    assert "7.500 M" in lines["all"] and "8.250 M" in lines["as published"] and "8.3" in lines["as published"]
    assert text.index("attention") < text.index("conv")
    assert "800 x 1333" in text and text.rstrip().endswith("3.00")


def test_what_the_paper_counts_more_is_said_where_it_does():
    more = "the classification head"
    assert more in format_analyses([counts()])
    assert more not in format_analyses([counts(as_published=7_500_000)])


def test_several_detectors_as_a_table():
    without = counts(name="b.yaml", flops=None, flops_by_operator={}, published_parameters=None)
    header, first, second = format_analyses([counts(), without]).splitlines()
    assert header.startswith("config") and len(header) == len(first) == len(second)
    assert first.split() == ["configs/a.yaml", "7.50", "8.25", "8.3", "6.71", "6.7", "3.0", "-"]
    assert second.split() == ["b.yaml", "7.50", "8.25", "-", "6.71", "6.7", "-", "-"]


def test_json():
    content = json.loads(json.dumps(as_json([counts()])))
    assert content[0]["parameters"] == {"backbone": 6_000_000, "fpn": 1_500_000}
    assert content[0]["size"] == [800, 1333] and content[0]["published_flops"] is None
