"""What a run has logged since it was last written down."""

import math
from collections import defaultdict

from detectron2.utils.events import get_event_storage

# The last values that detectron2's writers take medians of.
SMOOTHING_WINDOW = 20


def scalars_after(iteration: float, *, finite: bool = False) -> list[tuple[int, dict[str, float]]]:
    """The last value of each scalar that is newer than ``iteration``, or its median where it is smoothed.

    Args:
        finite: whether what is NaN or infinite is left out.

    Returns:
        Iterations, in their order, with values by name; an evaluation may be older than the losses beside it.
    """
    new: dict[int, dict[str, float]] = defaultdict(dict)
    for name, (value, when) in get_event_storage().latest_with_smoothing_hint(SMOOTHING_WINDOW).items():
        if when > iteration and (math.isfinite(value) or not finite):
            new[when][name] = value
    return sorted(new.items())
