"""What the Transformer-LS paper prints."""

import statistics

import pytest

from backbones import list_variants
from projects_vil.analysis.robustness.published import paper_figures
from projects_vil.analysis.robustness.scoring import ALEXNET_ERRORS
from projects_vil.analysis.robustness.sets import ROBUSTNESS_SETS

# Table 9 as printed, "Gauss." to "JPEG".
TABLE_9 = {
    "cvt_ls_13": (
        *(25.64, 36.89, 37.06, 38.06, 43.78, 43.78, 44.62, 45.92, 47.77, 47.91, 49.60, 49.66, 54.92, 57.24),
        68.72,
    ),
    "cvt_ls_21": (
        *(24.28, 34.95, 35.03, 35.93, 39.86, 40.71, 41.27, 41.78, 44.72, 45.24, 45.50, 47.19, 51.84, 53.78),
        67.05,
    ),
}


def test_figures_are_of_a_variant_at_a_size():
    figures = {name: str(figure) for name, figure in paper_figures("cvt_ls_21", (224, 224)).items()}
    assert figures == {
        "val": "82.7 (LS Table 3)",
        "real": "87.5 (LS Table 3)",
        "v2": "71.9 (LS Table 3)",
        "c": "55.2 (LS Table 4)",
        "a": "29.3 (LS Table 4)",
        "r": "45.0 (LS Table 4)",
        "in9": "97.2 (LS Table 10)",
        "in9-same": "91.5 (LS Table 4)",
        "in9-rand": "85.8 (LS Table 4)",
    }
    smaller = {name: figure.value for name, figure in paper_figures("cvt_ls_13", (224, 224)).items() if "in9" in name}
    assert smaller == {"in9": 97.0, "in9-same": 90.7, "in9-rand": 85.6}
    larger = {name: figure.value for name, figure in paper_figures("cvt_ls_21", (448, 448)).items()}
    assert larger == {"val": 83.6, "real": 88.2, "v2": 72.9}
    assert {name: figure.value for name, figure in paper_figures("ls_medium_384", (384, 384)).items()} == {"val": 84.4}


@pytest.mark.parametrize("size", [(224, 192), (64, 64), (384, 224)])
def test_another_size_has_none(size):
    assert paper_figures("cvt_ls_21", size) == {} and paper_figures("ls_base", size) == {}


def test_names_are_those_of_variants_and_sets():
    printed = {name: paper_figures(name, (224, 224)) for name in list_variants()}
    assert {name for name, figures in printed.items() if figures} == {
        *("cvt_ls_13", "cvt_ls_17", "cvt_ls_21", "cvt_ls_21s", "ls_medium", "ls_base")
    }
    assert all(figures.keys() <= ROBUSTNESS_SETS.keys() for figures in printed.values())


@pytest.mark.parametrize("variant", TABLE_9)
def test_table_9_stands_under_other_corruptions(variant):
    errors = TABLE_9[variant]
    assert list(errors) == sorted(errors)
    near = statistics.fmean(errors) / statistics.fmean(ALEXNET_ERRORS.values())
    assert near == pytest.approx(paper_figures(variant, (224, 224))["c"].value, abs=0.5)
