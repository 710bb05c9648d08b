"""What all conversions of official checkpoints share: the report, the check of a tensor, the line on a misfit."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from backbones.utils.errors import InputError


@dataclasses.dataclass
class ConversionReport:
    """What became of the names of an official checkpoint; official names first, ours second.

    Attributes:
        mapped: official name -> our name.
        resized: our name -> (official shape, our shape).
        split: official name -> our names, for tensors that became several.
        tied: official name -> our name of the parameter that it shares its values with.
        dropped: official name -> reason.
        initialised: our name -> why it has its initial value: the output norms of a LIT detector, which a classifier
            does not have, and the random features of a Performer's stages that are full attention in the file.
    """

    mapped: dict[str, str] = dataclasses.field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    split: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    initialised: dict[str, str] = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        """One line: how many names went where."""
        return ", ".join(f"{len(getattr(self, f.name))} {f.name}" for f in dataclasses.fields(self))


def check_weight(official_name: str, tensor: Tensor) -> None:
    """Raise an :class:`InputError` where ``tensor`` is no weight: of integers, a single number, or not finite."""
    if not tensor.is_floating_point() or not tensor.ndim:
        shape = tuple(tensor.shape)
        raise InputError(f"{official_name} is no weight: its type is {tensor.dtype}, its shape {shape}")
    if not tensor.isfinite().all():
        raise InputError(f"{official_name} has values that are not finite")


def describe_mismatch(
    name: str,
    unexplained: list[str],
    unfilled: list[str],
    misplaced: Mapping[str, str] | None = None,
    *,
    what: str = "variant",
    reason: str = "it is of another variant, or has other global tokens",
) -> str:
    """The line on a checkpoint that does not fit a variant or model.

    Args:
        name: of the variant.
        unexplained: official names to which no rule applies.
        unfilled: names of ours that lack values.
        misplaced: official name -> the name of ours that it would have, and that the variant does not have.
        what: it is that the checkpoint does not fit.
        reason: why names are misplaced.
    """
    parts = [f"the checkpoint does not fit {name}"]
    if misplaced:
        official, ours = next(iter(misplaced.items()))
        more = f", and {len(misplaced) - 1} more" if len(misplaced) > 1 else ""
        parts.append(f"{official} would be {ours}, which this {what} does not have{more}")
    for label, names in (("no rule explains", unexplained), ("nothing fills", unfilled)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{label} {', '.join(names[:5])}{more}")
    if misplaced:
        parts.append(reason)
    return "; ".join(parts)
