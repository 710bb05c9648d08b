"""The table of variants: hand counts of each mechanism, the papers' figures, and the reasons where they differ."""

import json
import math
import re
import runpy
import sys

import pytest
import torch
from torch import nn

from backbones import InputError, create_classifier, list_variants
from backbones.attention.alternatives.global_memory import GlobalMemoryAttention
from backbones.attention.alternatives.linformer import LinformerAttention
from backbones.attention.alternatives.performer import PerformerAttention
from backbones.attention.alternatives.spatial_reduction import SpatialReductionAttention
from backbones.attention.dense import DenseAttention
from backbones.attention.long_short import LongShortAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention
from backbones.layers.token_merging import DeformableTokenMerging
from backbones.variants import get_variant
from projects_vil.analysis import count_variants, counting, format_counts
from projects_vil.analysis.counting import (
    VariantCounts,
    count_parameters,
    count_variant,
    count_with_features,
    format_table,
    meta_classifier,
    multiply_adds,
)
from projects_vil.analysis.published import PUBLISHED_CLASSIFIERS, Printed, why_different
from tests.projects_vil.helpers import ROOT
from tests.selection import slow_except

# A map of whole windows and reductions, 3 x 4 chunks of 7 x 7; global tokens, channels and heads
HEIGHT, WIDTH, GLOBALS, DIM, HEADS = 21, 28, 2, 12, 3
LOCALS = HEIGHT * WIDTH
TOKENS = LOCALS + GLOBALS
# Query, key, value and output of every token
PROJECTIONS = 4 * DIM**2 * TOKENS
COMMON = {"num_heads": HEADS, "num_global_tokens": GLOBALS}


def on_meta(size: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(*size, device="meta")


def total(module: nn.Module, *inputs: torch.Tensor) -> int:
    return sum(multiply_adds(module, *inputs).values())


def total_at(model: nn.Module, side: int) -> float:
    return total(model, on_meta((1, 3, side, side))) / 1e9


# Each mechanism, and its attention by hand: both products, with the keys and the channels that are computed.
MECHANISMS = {
    "dense": (lambda: DenseAttention(DIM, **COMMON), 2 * TOKENS**2 * DIM),
    "sliding_chunk": (
        lambda: SlidingChunkAttention(DIM, window_size=7, **COMMON),
        # Nine chunks, three rows of global tokens, and a channel a head that marks hidden keys; then global queries
        2 * LOCALS * (9 * 49 + 3 * 7) * (DIM + HEADS) + 2 * GLOBALS * TOKENS * DIM,
    ),
    "long_short": (
        lambda: LongShortAttention(DIM, window_size=7, rank=8, **COMMON),
        # Scores and sums of the projection; a window of 13 x 13 and a column of shared keys; then global queries
        LOCALS * DIM * HEADS * 8
        + 2 * LOCALS * 8 * DIM
        + 2 * LOCALS * (13 * 13 + 13) * (DIM + HEADS)
        + 2 * GLOBALS * TOKENS * DIM,
    ),
    "global": (
        lambda: GlobalMemoryAttention(DIM, **COMMON),
        2 * LOCALS * GLOBALS * DIM + 2 * GLOBALS * TOKENS * DIM,
    ),
    "linformer": (
        lambda: LinformerAttention(DIM, map_size=(HEIGHT, WIDTH), num_features=10, **COMMON),
        2 * TOKENS * 10 * DIM + 2 * TOKENS * 10 * DIM,
    ),
    "spatial_reduction": (
        lambda: SpatialReductionAttention(DIM, reduction=7, **COMMON),
        # A convolution over all places; keys and values of 3 x 4 places instead of all
        DIM**2 * LOCALS + 2 * DIM**2 * (12 - LOCALS) + 2 * TOKENS * (12 + GLOBALS) * DIM,
    ),
    "performer": (
        lambda: PerformerAttention(DIM, num_features=10, **COMMON),
        # Features of queries and keys, their sums, and the normaliser of each head
        4 * TOKENS * DIM * 10 + TOKENS * HEADS * 10,
    ),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_equals_a_hand_count(mechanism):
    create, attention = MECHANISMS[mechanism]
    with torch.device("meta"):
        module = create()
    counted = total(module, on_meta((1, HEIGHT, WIDTH, DIM)), on_meta((1, GLOBALS, DIM)))
    assert counted == PROJECTIONS + attention


def test_memory_and_gradients_make_no_difference():
    create, attention = MECHANISMS["dense"]
    module = create()
    counted = total(module, torch.ones(1, HEIGHT, WIDTH, DIM), torch.ones(1, GLOBALS, DIM))
    assert counted == PROJECTIONS + attention


def test_deformable_merging_equals_a_hand_count():
    with torch.device("meta"):
        module = DeformableTokenMerging(6, 10)
    # An odd height is padded: 5 x 6 merged tokens, to 8 offsets and to 10 channels
    assert total(module, on_meta((1, 6, 9, 12))) == 5 * 6 * (2 * 2 * 6) * (8 + 10)


def products(name: str, attention) -> float:
    """1e9 multiply-adds of a ViL by hand, without global tokens; ``attention`` takes a stage and its tokens."""
    side, in_channels, number = 224, 3, 0
    for stage in get_variant(name).stages:
        side //= stage.patch_size
        number += side**2 * stage.patch_size**2 * in_channels * stage.dim
        number += stage.depth * (12 * side**2 * stage.dim**2 + attention(stage, side**2))
        in_channels = stage.dim
    return (number + in_channels * 1000) / 1e9


def test_a_whole_classifier_equals_a_hand_count():
    with torch.device("meta"):
        classifier = create_classifier("full_tiny_2_9_1", global_tokens=0)
    assert total_at(classifier, 224) == products("full_tiny_2_9_1", lambda s, n: 2 * n * n * s.dim)


# -- the papers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "printed, lowest, below",
    [
        (Printed("6.7"), 6.65, 6.751),
        (Printed("1.00"), 0.995, 1.0051),
        (Printed("19", truncated=True), 19, 20),
        (Printed("0.5", truncated=True), 0.5, 0.6001),
    ],
)
def test_what_is_printed_so(printed, lowest, below):
    assert printed.agrees(lowest) and not printed.agrees(lowest - 1e-3) and not printed.agrees(below)
    assert printed.agrees((lowest + below) / 2)


def test_figures_are_those_of_variants():
    assert PUBLISHED_CLASSIFIERS.keys() <= set(list_variants())
    assert not any(name.endswith("_rpb") for name in PUBLISHED_CLASSIFIERS)
    # 11 mechanisms at 8 sizes and with the depths left out, four more sizes of ViL, two flat ones, LS, CvT-LS and LIT
    assert len(PUBLISHED_CLASSIFIERS) == 11 * (8 + 2) + 4 + 2 + 3 + 4 + 4
    texts = {name: (p.text, f.text) for name, (p, f) in PUBLISHED_CLASSIFIERS.items()}
    assert texts["sra64_small_2_9_1"] == ("54.6", "3.92") and texts["vil_tiny"] == ("6.7", "1.3")
    # Table 2
    assert texts["evit_full_16_tiny"] == ("5.7", "1.3") and texts["evit_full_16_small"] == ("22.1", "4.6")
    assert texts["global_tiny_1_2_8_1"] == ("6.5", "1.76") and texts["lit_b"] == ("86", "15.0")
    assert texts["full_small"] == texts["full_small_1_2_8_1"] and texts["full_tiny"] == texts["full_tiny_1_1_9_1"]


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["linformer_tiny_1_10_1", "evit_full_16_tiny", "lit_ti", "ls_medium_384"],
        ["linformer_tiny_1_10_1", "evit_full_16_tiny"],
    ),
)
def test_counts_that_agree(name):
    counts = count_variant(name)
    assert counts.differs == [] and counts.img_size == (384 if name.endswith("384") else 224)
    assert (counts.backbone_flops is None) == name.startswith("linformer")


@pytest.mark.parametrize("name", PUBLISHED_CLASSIFIERS)
def test_reasons_are_rows_of_the_document(name):
    rows = why_different(name, parameters=0, flops=0)
    section = (ROOT / "docs/deviations.md").read_text().partition("## Counts that differ from the papers'")[2]
    assert set(rows) - {"?"} <= set(re.findall(r"^\| ([a-z ]+) \|", section, flags=re.MULTILINE))
    parameters, flops = PUBLISHED_CLASSIFIERS[name]
    assert why_different(name, round(parameters.value * 1e6), round(flops.value * 1e9)) == []


def test_reasons():
    assert why_different("vil_tiny_rpb", 0, 0) == []
    assert why_different("ls_base", 0, 0) == ["?"]
    assert why_different("cvt_ls_13", 0, 4_900_000_000) == ["ranks"]
    assert why_different("global_tiny", 6_800_000, 0) == ["global memory"]


@pytest.mark.parametrize("mechanism", ["full", "linformer", "partial_linformer", "sra64", "sra32", "partial_sra32"])
@pytest.mark.parametrize("size", slow_except(["tiny_1_10_1", "small_1_2_8_1"], ["tiny_1_10_1"]))
def test_reason_global_tokens(mechanism, size):
    name = f"{mechanism}_{size}"
    with torch.device("meta"):
        without = create_classifier(name, global_tokens=0)
    assert total_at(without, 224) == pytest.approx(PUBLISHED_CLASSIFIERS[name][1].value, abs=0.0055)


@pytest.mark.parametrize("name", [name for name in PUBLISHED_CLASSIFIERS if name.startswith("vil_")])
def test_reason_window(name):
    counted = products(name, lambda stage, tokens: 2 * tokens * min(15**2, tokens) * stage.dim)
    assert PUBLISHED_CLASSIFIERS[name][1].agrees(counted)


@pytest.mark.parametrize("name", [name for name in PUBLISHED_CLASSIFIERS if "performer_" in name])
def test_reason_random_features(name):
    def attention(stage, tokens):
        keys = {"performer": 6 * 256, "dense": 2 * tokens}[stage.attention]
        return tokens * keys * stage.dim

    # Partial, small 1-2-8-1 misses its rounding by 0.00002.
    assert products(name, attention) == pytest.approx(PUBLISHED_CLASSIFIERS[name][1].value, abs=0.00502)


def test_reason_flat_positions():
    """As DeiT: a value for each of 196 tokens and the global one, in the place of rows and columns."""
    classifier = meta_classifier("evit_full_16_small")
    positions = sum(p.numel() for name, p in classifier.named_parameters() if ".positions." in name)
    printed, flops = PUBLISHED_CLASSIFIERS["evit_full_16_small"]
    count = count_parameters(classifier)
    assert printed.agrees((count - positions + 197 * 384) / 1e6) and not printed.agrees(count / 1e6)
    assert flops.agrees(total_at(classifier, 224))


@pytest.mark.parametrize("name", ["cvt_ls_13", "cvt_ls_17", "cvt_ls_21"])
def test_reason_ranks(name):
    with torch.device("meta"):
        larger = create_classifier(name, rank=(128, 32, 8))
    assert PUBLISHED_CLASSIFIERS[name][0].agrees(count_parameters(larger) / 1e6)
    assert not PUBLISHED_CLASSIFIERS[name][0].agrees(count_parameters(meta_classifier(name)) / 1e6)


@pytest.mark.parametrize("name", ["lit_ti", "lit_s", "lit_m", "lit_b"])
def test_reason_no_head(name):
    classifier = meta_classifier(name)
    rest = count_parameters(classifier) - count_parameters(classifier.head)
    assert PUBLISHED_CLASSIFIERS[name][0].agrees(rest / 1e6)


def test_random_features_count_as_parameters():
    classifier = meta_classifier("performer_tiny")
    # Of 12 blocks, 256 features of a head's channels
    features = 256 * (48 + 32 + 9 * 64 + 64)
    assert count_with_features(classifier) == count_parameters(classifier) + features


# -- the command -----------------------------------------------------------------------------------


def counts(**changes) -> VariantCounts:
    values = {
        "name": "vil_tiny_2_9_1",
        "parameters": 6_785_416,
        "published_parameters": 6.78,
        "flops": 1_370_000_000,
        "published_flops": 1.29,
        "img_size": 224,
        "backbone_flops": 34_504_000_000,
        "differs": ["last digit", "window"],
    }
    return VariantCounts(**values | changes)


def test_table():
    plain = counts(name="vil_tiny_rpb", backbone_flops=None, differs=[])
    header, first, second, note = format_counts([counts(), plain]).splitlines()
    assert header.startswith("variant") and header.endswith("differs")
    assert first.split()[1:8] == ["6.79", "6.78", "+0.01", "1.37", "1.29", "+0.08", "34.5"]
    assert first.endswith("  last digit, window") and "docs/deviations.md" in note
    assert second.split() == ["vil_tiny_rpb", "6.79", "-", "-", "1.37", "-", "-", "-"]
    assert len(format_counts([plain]).splitlines()) == 2


def test_columns_are_aligned():
    assert format_table([("a", "1", "x"), ("bbb", "22", "")], left=(0, 2)) == "a     1  x\nbbb  22"


def test_prefixes(monkeypatch):
    monkeypatch.setattr(counting, "count_variant", lambda name: name)
    names = count_variants(["vil_tiny_1_1_3", "vil_tiny_1_1_3_1_rpb"])
    assert names == ["vil_tiny_1_1_3_1", "vil_tiny_1_1_3_1_rpb"]
    assert count_variants() == list_variants()
    with pytest.raises(InputError, match=r"^no variant starts with 'vil_tinny'; did you mean 'vil_tiny'\?$"):
        count_variants(["lit", "vil_tinny"])


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["analyze_model.py", *arguments])
    status = 0
    try:
        runpy.run_path(str(ROOT / "tools/analyze_model.py"), run_name="__main__")
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


@pytest.mark.slow
def test_command(monkeypatch, capsys, tmp_path):
    path = tmp_path / "counts.json"
    status, out, _ = run(monkeypatch, capsys, "--variants", "vil_tiny_2_9_1", "vil_tiny_1_1_3_1", "--json", str(path))
    assert status == 0
    names = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert names == ["vil_tiny_1_1_3_1", "vil_tiny_1_1_3_1_rpb", "vil_tiny_2_9_1", "vil_tiny_2_9_1_rpb"]
    content = {row["name"]: row for row in json.loads(path.read_text())}
    row = content["vil_tiny_2_9_1"]
    assert row["parameters"] == 6_785_416 and (row["published_parameters"], row["published_flops"]) == (6.78, 1.29)
    assert math.isclose(row["flops"], 1.3674e9, rel_tol=1e-4) and row["differs"] == ["last digit", "window"]
    assert content["vil_tiny_1_1_3_1"]["published_flops"] is None


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--variants", "nothing_so"], "error: no variant starts with 'nothing_so'"),
        (["--variants", "--config-file", "a.yaml"], "argument --config-file: not allowed with argument --variants"),
        ([], "one of the arguments --config-file --variants is required"),
        (["--variants", "--no-flops"], "error: --no-flops is for --config-file"),
        (["--variants", "--opts", "SEED", "1"], "error: an override is for --config-file"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, arguments, line):
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status != 0 and not out
    assert line in err.splitlines()[-1]
