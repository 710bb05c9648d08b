"""Every size, once: what the names of :func:`backbones.create_backbone` stand for.

ViL: Tables 1, 9 and 15 of the paper. ``window_size`` is the side of a chunk, so that 7 is the paper's window of 15.
"""

import dataclasses
from collections.abc import Sequence

from backbones.errors import InputError, closest


@dataclasses.dataclass(frozen=True)
class ViLStage:
    """One E-ViT stage (ViL section 3.1): ``depth`` blocks of ``heads`` heads on ``dim`` channels.

    ``attention`` is ``"sliding_chunk"`` or ``"dense"``.
    """

    depth: int
    patch_size: int
    heads: int
    dim: int
    global_tokens: int = 1
    attention: str = "sliding_chunk"
    window_size: int = 7


@dataclasses.dataclass(frozen=True)
class ViLVariant:
    """A multi-scale ViL. ``relative_bias`` takes the place of absolute positions."""

    stages: tuple[ViLStage, ...]
    relative_bias: bool = False
    attention_mode: str = "zero_pad"
    shared_projections: bool = True

    def with_options(
        self,
        *,
        window_size: int | Sequence[int] | None = None,
        global_tokens: int | Sequence[int] | None = None,
        attention_mode: str | None = None,
        shared_projections: bool | None = None,
    ) -> "ViLVariant":
        """The variant with what is not None in place of its own; a sequence has one entry for each stage.

        Raises:
            InputError: where a sequence has another length or an entry is too small.
        """
        stages = self.stages
        for field, value, least in (("window_size", window_size, 1), ("global_tokens", global_tokens, 0)):
            if value is None:
                continue
            values = list(value) if isinstance(value, Sequence) else [value] * len(stages)
            if len(values) != len(stages) or not all(isinstance(v, int) and v >= least for v in values):
                raise InputError(
                    f"{field}={value!r}: it is a whole number, {least} or more, or {len(stages)} of them, one a stage"
                )
            stages = tuple(dataclasses.replace(s, **{field: v}) for s, v in zip(stages, values, strict=True))
        changes = {"attention_mode": attention_mode, "shared_projections": shared_projections}
        return dataclasses.replace(self, stages=stages, **{k: v for k, v in changes.items() if v is not None})


def _vil(*stages: tuple[int, int, int, int]) -> ViLVariant:
    """Stages as the paper's tables have them: (n, p, h, d). The last stage has no global token, as released."""
    last = len(stages) - 1
    return ViLVariant(
        tuple(ViLStage(n, p, h, d, global_tokens=int(i < last)) for i, (n, p, h, d) in enumerate(stages))
    )


def _full(variant: ViLVariant) -> ViLVariant:
    stages = tuple(dataclasses.replace(stage, attention="dense") for stage in variant.stages)
    return dataclasses.replace(variant, stages=stages)


def _by_depth(size: str, *depths: int) -> ViLVariant:
    """Tiny or small with other depths; three stages start at stride 8 (Table 9)."""
    widths = {"tiny": ((1, 48), (3, 96), (3, 192), (6, 384)), "small": ((3, 96), (3, 192), (6, 384), (12, 768))}[size]
    widths = widths[-len(depths) :]
    first_patch = 4 if len(depths) == 4 else 8
    patches = (first_patch,) + (2,) * (len(depths) - 1)
    return _vil(*((n, p, h, d) for n, p, (h, d) in zip(depths, patches, widths, strict=True)))


_VIL = {
    "vil_tiny": _vil((1, 4, 1, 48), (1, 2, 3, 96), (9, 2, 3, 192), (1, 2, 6, 384)),
    "vil_small": _vil((1, 4, 3, 96), (2, 2, 3, 192), (8, 2, 6, 384), (1, 2, 12, 768)),
    "vil_medium_deep": _vil((1, 4, 3, 96), (4, 2, 3, 192), (16, 2, 6, 384), (1, 2, 12, 768)),
    "vil_medium_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 8, 512), (1, 2, 12, 768)),
    "vil_base_deep": _vil((1, 4, 3, 96), (8, 2, 3, 192), (24, 2, 6, 384), (1, 2, 12, 768)),
    "vil_base_wide": _vil((1, 4, 3, 192), (2, 2, 6, 384), (8, 2, 12, 768), (1, 2, 16, 1024)),
} | {
    f"vil_{size}_{'_'.join(map(str, depths))}": _by_depth(size, *depths)
    for size in ("tiny", "small")
    for depths in ((1, 10, 1), (2, 9, 1), (1, 9, 2), (2, 8, 2), (1, 1, 9, 1), (1, 2, 8, 1))
}
# For the demo: in no table of the paper.
_VIL["vil_tiny_1_1_3_1"] = _by_depth("tiny", 1, 1, 3, 1)

VARIANTS: dict[str, ViLVariant] = (
    _VIL
    | {f"{name}_rpb": dataclasses.replace(variant, relative_bias=True) for name, variant in _VIL.items()}
    | {f"full_{size}": _full(_VIL[f"vil_{size}"]) for size in ("tiny", "small")}
)


def get_variant(name: str) -> ViLVariant:
    """The variant of that name.

    Raises:
        InputError: for an unknown name, with the closest one.
    """
    if name not in VARIANTS:
        hint = closest(str(name), VARIANTS) or f"; there are: {', '.join(sorted(VARIANTS))}"
        raise InputError(f"unknown variant {name!r}{hint}")
    return VARIANTS[name]
