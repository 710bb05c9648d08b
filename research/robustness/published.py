"""Figures of the Transformer-LS (LS) paper on these sets; the other two papers have none.

Its table 9, errors by corruption, is left out: each of its rows ascends from the first column to the last, so that the
columns cannot be the corruptions that they are named after.
"""

from typing import NamedTuple


class PaperFigure(NamedTuple):
    """A figure in percent, and its table."""

    value: float
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


_TABLE_3, _TABLE_4, _TABLE_10 = "LS Table 3", "LS Table 4", "LS Table 10"
# Table 3, section 4.3, by variant: top-1 on ImageNet val, ImageNet-Real and ImageNet-V2; "-" as printed. At 224 pixels,
# ls_medium_384 at 384.
_CLASSIFICATION = {
    "cvt_ls_13": "81.9 87.0 70.5",
    "cvt_ls_17": "82.5 87.2 71.6",
    "cvt_ls_21": "82.7 87.5 71.9",
    "cvt_ls_21s": "82.9 87.4 71.7",
    "ls_medium": "83.8 - -",
    "ls_base": "84.1 - -",
    "ls_medium_384": "84.4 - -",
}
# Table 3 has cvt_ls_21 at larger images too, by their side in pixels.
_LARGER = {384: "83.2 88.0 72.5", 448: "83.6 88.2 72.9"}
# Table 4, section 4.3: mCE on ImageNet-C, top-1 on ImageNet-A and ImageNet-R, and on two of ImageNet-9.
_ROBUSTNESS = {"cvt_ls_13": "58.7 27.0 42.6 90.7 85.6", "cvt_ls_21": "55.2 29.3 45.0 91.5 85.8"}
# Table 10, appendix D: top-1 on ImageNet-9 Original; it repeats the other two.
_ORIGINAL = {"cvt_ls_13": "97.0", "cvt_ls_21": "97.2"}


def paper_figures(variant: str, img_size: tuple[int, int]) -> dict[str, PaperFigure]:
    """Return set -> the paper's figure of a variant at that size; for ``"c"`` it is mCE.

    The paper does not name its version of ImageNet-V2: its figure is returned for ``"v2"``, matched frequency.

    Args:
        variant: of ``backbones.list_variants()``.
        img_size: height and width in pixels.
    """
    own = 384 if variant == "ls_medium_384" else 224
    if img_size == (own, own):
        rows = [(_CLASSIFICATION.get(variant), ("val", "real", "v2"), _TABLE_3)]
        rows.append((_ROBUSTNESS.get(variant), ("c", "a", "r", "in9-same", "in9-rand"), _TABLE_4))
        rows.append((_ORIGINAL.get(variant), ("in9",), _TABLE_10))
    elif variant == "cvt_ls_21" and img_size[0] == img_size[1]:
        rows = [(_LARGER.get(img_size[0]), ("val", "real", "v2"), _TABLE_3)]
    else:
        rows = []
    return {
        name: PaperFigure(float(text), source)
        for row, names, source in rows
        if row is not None
        for name, text in zip(names, row.split(), strict=True)
        if text != "-"
    }
