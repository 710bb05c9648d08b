"""Results of the Transformer-LS (LS) paper on these sets. The other two papers have none.

Table 9 of the paper, errors by corruption, is left out. Each of its rows ascends from the first column to the last, so
the columns cannot be the named corruptions.
"""

_TABLE_3, _TABLE_4, _TABLE_10 = "LS Table 3", "LS Table 4", "LS Table 10"
# By variant and side of the images in pixels.
_FIGURES = {
    # Table 3, section 4.3: top-1 on ImageNet val, ImageNet-Real and ImageNet-V2; "-" as in the paper.
    (_TABLE_3, ("val", "real", "v2")): {
        ("cvt_ls_13", 224): "81.9 87.0 70.5",
        ("cvt_ls_17", 224): "82.5 87.2 71.6",
        ("cvt_ls_21", 224): "82.7 87.5 71.9",
        ("cvt_ls_21_384", 384): "83.2 88.0 72.5",
        ("cvt_ls_21_448", 448): "83.6 88.2 72.9",
        ("cvt_ls_21s", 224): "82.9 87.4 71.7",
        ("ls_medium", 224): "83.8 - -",
        ("ls_base", 224): "84.1 - -",
        ("ls_medium_384", 384): "84.4 - -",
    },
    # Table 4, section 4.3: mCE on ImageNet-C, top-1 on ImageNet-A and ImageNet-R, and on two of ImageNet-9.
    (_TABLE_4, ("c", "a", "r", "in9-same", "in9-rand")): {
        ("cvt_ls_13", 224): "58.7 27.0 42.6 90.7 85.6",
        ("cvt_ls_21", 224): "55.2 29.3 45.0 91.5 85.8",
    },
    # Table 10, appendix D: top-1 on ImageNet-9 Original; it repeats the other two.
    (_TABLE_10, ("in9",)): {("cvt_ls_13", 224): "97.0", ("cvt_ls_21", 224): "97.2"},
}


def paper_figures(variant: str, img_size: tuple[int, int]) -> dict[str, tuple[float, str]]:
    """Return set -> the published result of a variant at an image size, in percent, and its table.

    The result is top-1, or mCE for ``"c"``. The paper does not name its version of ImageNet-V2. Its result is returned
    for ``"v2"``, matched frequency.

    Args:
        variant: One of ``backbones.list_variants()``.
        img_size: Height and width in pixels.
    """
    if img_size[0] != img_size[1]:
        return {}
    return {
        name: (float(text), table)
        for (table, names), rows in _FIGURES.items()
        for name, text in zip(names, rows.get((variant, img_size[0]), "").split(), strict=False)
        if text != "-"
    }
