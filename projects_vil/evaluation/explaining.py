"""Why a figure of an evaluation is not a number, or next to nothing."""

import math
from collections.abc import Iterable, Mapping

# The areas that COCO's evaluation calls small, medium and large, in pixels of the image.
SIZES = {
    "s": ("small", "below 32 x 32 pixels"),
    "m": ("medium", "of 32 x 32 to 96 x 96 pixels"),
    "l": ("large", "above 96 x 96 pixels"),
}
# An AP in percent below which something other than the model may be wrong.
LITTLE = 0.1
_NAMED = 5  # classes in one line


def explain_results(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One line for each cause of figures that are nan (-1 in COCO's own table), and for an AP of about 0.

    Args:
        results: task -> metric -> value, as an evaluator returns them.
    """
    return [line for task, metrics in results.items() for line in _explain_task(task, metrics)]


def _explain_task(task: str, metrics: Mapping[str, float]) -> list[str]:
    main = metrics.get("AP")
    if main is None:
        return _explain_classes(task, metrics, "IoU")
    if math.isnan(main):
        return [
            f"{task}: AP is not a number: there is no detection at all, since none scored high enough, or no object "
            "to find"
        ]
    lines = []
    for letter, (name, extent) in SIZES.items():
        if math.isnan(metrics.get(f"AP{letter}", 0.0)):
            lines.append(f"{task}: AP{letter} is not a number: the dataset has no {name} objects ({extent})")
    lines += _explain_classes(task, metrics, "AP")
    if main < LITTLE:
        lines.append(
            f"{task}: AP is {main:.3f}: likely causes are few iterations, classes in another order than in the "
            "weights, or boxes in another format than left, top, width, height in pixels"
        )
    return lines


def _explain_classes(task: str, metrics: Mapping[str, float], metric: str) -> list[str]:
    absent = [name for name, value in class_values(metrics, metric).items() if math.isnan(value)]
    if not absent:
        return []
    figures = f"{metric} of {_listed(absent)} {'is' if len(absent) == 1 else 'are'} not a number"
    return [f"{task}: {figures}: the dataset has no such objects"]


def class_values(metrics: Mapping[str, float], metric: str) -> dict[str, float]:
    """Of a task's metrics such as ``AP-dog``, those of one metric, by the class's name as in the dataset."""
    beginning = f"{metric}-"
    return {name.removeprefix(beginning): value for name, value in metrics.items() if name.startswith(beginning)}


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more classes" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
