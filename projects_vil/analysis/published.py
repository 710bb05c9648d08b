"""Parameters and multiply-adds as printed in the papers, and the reasons why counts differ from them.

ViL is "Multi-Scale Vision Longformer", LS is "Long-Short Transformer", LIT is "Less is More".
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PublishedFigure:
    """A figure of a paper.

    Attributes:
        text: the figure as printed, with the zeros at the end that ViL Table 14 leaves out.
        truncated: whether further digits were cut off, and not rounded.
    """

    text: str
    truncated: bool = False

    @property
    def value(self) -> float:
        return int(self.text) if self.text.isdigit() else float(self.text)

    def agrees(self, count: float) -> bool:
        """Return whether ``count``, in the unit of the figure, would be printed as the figure is."""
        unit = 10.0 ** -len(self.text.partition(".")[2])
        if self.truncated:
            return 0 <= count - self.value < unit
        return abs(count - self.value) <= unit / 2 * (1 + 1e-9)


# Detectors at 800 x 1333 pixels, by meta-architecture and variant: parameters in millions and 1e9 multiply-adds.
# ViL Tables 6 to 8, LIT Tables 6 to 8 (at 512 x 512). Those of LIT count parameters alone, in whole millions.
PUBLISHED_DETECTORS: dict[tuple[str, str], tuple[float, float | None]] = {
    ("RetinaNet", "vil_tiny"): (16.64, 171.91),
    ("RetinaNet", "vil_small"): (35.68, 252.21),
    ("RetinaNet", "vil_medium_deep"): (50.77, 338.93),
    ("RetinaNet", "vil_base_deep"): (66.74, 443.0),
    ("Mask R-CNN", "vil_tiny"): (26.9, 94.3),
    ("Mask R-CNN", "vil_small"): (45.0, 174.3),
    ("Mask R-CNN", "vil_medium_deep"): (60.1, 261.1),
    ("Mask R-CNN", "vil_base_deep"): (76.1, 365.1),
    ("Mask R-CNN", "sra64_small"): (73.3, 153.9),
    ("Mask R-CNN", "sra32_small"): (51.5, 176.6),
    ("Mask R-CNN", "partial_sra32_small"): (46.8, 159.0),
    ("Mask R-CNN", "global_small"): (45.2, 177.1),
    ("Mask R-CNN", "partial_global_small"): (45.1, 158.5),
    ("Mask R-CNN", "performer_small"): (45.0, 160.7),
    ("Mask R-CNN", "partial_performer_small"): (45.0, 160.7),
    ("Mask R-CNN", "partial_vil_small"): (45.0, 164.4),
    ("RetinaNet", "lit_ti"): (30, None),
    ("RetinaNet", "lit_s"): (39, None),
    ("Mask R-CNN", "lit_ti"): (40, None),
    ("Mask R-CNN", "lit_s"): (48, None),
    ("SemanticSegmentor", "lit_ti"): (24, None),
    ("SemanticSegmentor", "lit_s_seg"): (32, None),
}

_DEPTHS = ("1_10_1", "2_9_1", "1_1_9_1", "1_2_8_1")
# ViL Table 14, by depth, tiny and then small: parameters in millions.
_TABLE_14_PARAMETERS = {
    "linformer": "7.8 7.7 8.2 8.0 28.3 27.1 27.4 26.3",
    "partial_linformer": "7.3 7.2 7.7 7.6 27.8 26.7 27.0 25.8",
    "sra64": "14.2 13.9 13.8 13.5 55.9 54.6 54.3 52.9",
    "sra32": "8.7 8.4 8.3 8.0 34.1 32.7 32.5 31.1",
    "partial_sra32": "7.3 7.1 7.0 6.8 28.2 27.4 27.1 26.4",
    "global": "7.2 6.9 6.8 6.5 27.8 26.4 26.2 24.9",
    "partial_global": "7.2 6.9 6.8 6.5 27.8 26.4 26.2 24.9",
    "performer": "7.3 7.0 6.9 6.6 27.8 26.5 26.2 24.8",
    "partial_performer": "7.1 6.8 6.7 6.4 27.6 26.3 26.0 24.7",
    # Table 2 has one digit more of these two.
    "full": "7.12 6.78 6.71 6.37 27.58 26.25 25.96 24.63",
    "vil": "7.12 6.78 6.71 6.37 27.58 26.25 25.96 24.63",
}
# The same, 1e9 multiply-adds.
_TABLE_14_FLOPS = {
    "full": "1.35 1.45 2.29 2.39 4.84 5.05 6.74 6.95",
    "vil": "1.27 1.29 1.33 1.35 4.67 4.71 4.82 4.86",
    "linformer": "1.57 1.60 1.69 1.73 5.27 5.35 5.55 5.62",
    "partial_linformer": "1.31 1.37 1.46 1.52 4.76 4.88 5.08 5.21",
    "sra64": "0.99 0.99 1.00 1.00 3.92 3.92 3.97 3.97",
    "sra32": "1.09 1.09 1.10 1.10 4.23 4.23 4.28 4.28",
    "partial_sra32": "1.23 1.22 1.24 1.22 4.60 4.56 4.61 4.57",
    "global": "1.69 1.70 1.75 1.76 6.65 6.67 6.76 6.78",
    "partial_global": "1.60 1.62 1.68 1.70 6.07 6.14 6.23 6.30",
    "performer": "1.81 1.86 1.99 2.05 5.75 5.87 6.14 6.26",
    "partial_performer": "1.35 1.45 1.57 1.67 4.84 5.04 5.31 5.52",
}
# ViL Table 4, the flat models of its Table 2, and LS Table 3: parameters in millions and 1e9 multiply-adds.
_SINGLE = {
    "evit_full_16_tiny": "5.7 1.3",
    "evit_full_16_small": "22.1 4.6",
    "vil_tiny": "6.7 1.3",
    "vil_small": "24.6 4.9",
    "vil_medium_deep": "39.7 8.7",
    "vil_medium_wide": "39.8 10.8",
    "vil_base_deep": "55.7 13.4",
    "vil_base_wide": "79.0 17.5",
    "ls_medium": "39.8 8.7",
    "ls_base": "55.8 13.4",
    "ls_medium_384": "39.9 28.7",
    "cvt_ls_13": "20.3 4.9",
    "cvt_ls_17": "23.7 9.8",
    "cvt_ls_21": "32.1 7.9",
    "cvt_ls_21s": "30.1 11.3",
}
# LIT Table 2: parameters in whole millions, cut off, and 1e9 multiply-adds.
_LIT = {"lit_ti": "19 3.6", "lit_s": "27 4.1", "lit_m": "48 8.6", "lit_b": "86 15.0"}


def _classifiers() -> dict[str, tuple[PublishedFigure, PublishedFigure]]:
    figures = {}
    for mechanism, parameters in _TABLE_14_PARAMETERS.items():
        columns = [f"{mechanism}_{size}_{depths}" for size in ("tiny", "small") for depths in _DEPTHS]
        cells = zip(parameters.split(), _TABLE_14_FLOPS[mechanism].split(), strict=True)
        figures |= {name: tuple(map(PublishedFigure, cell)) for name, cell in zip(columns, cells, strict=True)}
        # Without depths a name has those that the paper chose.
        figures[f"{mechanism}_tiny"] = figures[f"{mechanism}_tiny_1_1_9_1"]
        figures[f"{mechanism}_small"] = figures[f"{mechanism}_small_1_2_8_1"]
    figures |= {name: tuple(map(PublishedFigure, row.split())) for name, row in _SINGLE.items()}
    for name, row in _LIT.items():
        parameters, flops = row.split()
        figures[name] = (PublishedFigure(parameters, truncated=True), PublishedFigure(flops))
    return figures


# Classifiers with 1000 classes, by variant: parameters in millions, and 1e9 multiply-adds for an image of 224 pixels a
# side, or of 384 for ``ls_medium_384``.
PUBLISHED_CLASSIFIERS = _classifiers()

# Rows of docs/deviations.md that explain differences from these, by the start of the name.
_PARAMETER_REASONS = {
    "full_": "last digit",
    "vil_": "last digit",
    "performer_": "last digit",
    "evit_": "flat positions",
    "cvt_ls_": "ranks",
    "lit_": "no head",
}
_FLOPS_REASONS = {
    "full_": "global tokens",
    "linformer_": "global tokens",
    "partial_linformer_": "global tokens",
    "sra64_": "global tokens",
    "sra32_": "global tokens",
    "partial_sra32_": "global tokens",
    "vil_": "window",
    "performer_": "random features",
    "partial_performer_": "random features",
    "global_": "global memory",
    "partial_global_": "global memory",
    "cvt_ls_": "norms",
}


def deviation_rows(name: str, parameters: int, flops: int) -> list[str]:
    """Return the rows of docs/deviations.md that explain why counts of a variant differ from its paper.

    ``"?"`` for a difference that no row explains; none where the counts agree or nothing is printed.
    """
    if name not in PUBLISHED_CLASSIFIERS:
        return []
    rows = []
    counts = (parameters / 1e6, flops / 1e9)
    tables = (_PARAMETER_REASONS, _FLOPS_REASONS)
    for count, printed, reasons in zip(counts, PUBLISHED_CLASSIFIERS[name], tables, strict=True):
        if not printed.agrees(count):
            rows.append(next((row for start, row in reasons.items() if name.startswith(start)), "?"))
    return list(dict.fromkeys(rows))
