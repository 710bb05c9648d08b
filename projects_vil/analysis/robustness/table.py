"""What was found on the sets, as a Markdown table and as JSON."""

import dataclasses
import statistics
from collections.abc import Sequence

from projects_vil.analysis.robustness.evaluate import CorruptionResult, Evaluation, SetResult
from projects_vil.analysis.robustness.scoring import SEVERITIES, Score
from projects_vil.analysis.robustness.sets import ROBUSTNESS_SETS

_HEAD = ("set", "images", "top-1 %", "top-5 %", "CE %", "paper %")
_NONE = "-"
_CORRUPTED = ROBUSTNESS_SETS["c"]


def format_robustness(evaluation: Evaluation) -> str:
    """The table: a row a set; for ImageNet-C one a corruption, of its severities together, and one of mCE.

    Where a set is not whole, the files are said beside the images. The paper's figure is top-1, and for ImageNet-C mCE.
    """
    rows: list[Sequence[str]] = [_HEAD, ("---",) * len(_HEAD)]
    for name, result in evaluation.sets.items():
        rows += _rows_of_corruptions(result) if result.corruptions else [_row(name, result)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, result: SetResult) -> Sequence[str]:
    the_set, paper = ROBUSTNESS_SETS[name], str(result.paper or _NONE)
    if result.score is None:
        return the_set.title, f"missing: {', '.join(result.missing)}", _NONE, _NONE, _NONE, paper
    return the_set.title, *_cells([result.score], the_set.num_images), _NONE, paper


def _rows_of_corruptions(result: SetResult) -> list[Sequence[str]]:
    rows = [_row_of_corruption(f"{_CORRUPTED.title} {name}", found) for name, found in result.corruptions.items()]
    title, paper = f"{_CORRUPTED.title} mCE", str(result.paper or _NONE)
    if result.error is None:
        folders = len(SEVERITIES) * len(result.corruptions)
        return [*rows, (title, f"missing: {len(result.missing)} of {folders} folders", _NONE, _NONE, _NONE, paper)]
    scores = [score for found in result.corruptions.values() for score in found.scores.values()]
    return [*rows, (title, *_cells(scores, _CORRUPTED.num_images), f"{result.error:.2f}", paper)]


def _row_of_corruption(title: str, found: CorruptionResult) -> Sequence[str]:
    if not found.scores:
        return title, "missing: all severities", _NONE, _NONE, _NONE, _NONE
    images, *means = _cells(list(found.scores.values()), _CORRUPTED.num_images)
    if found.error is None:
        return title, f"{images}, {len(found.scores)} of {len(SEVERITIES)} severities", *means, _NONE, _NONE
    return title, images, *means, f"{found.error:.2f}", _NONE


def _cells(scores: Sequence[Score], published: int) -> tuple[str, str, str]:
    """All images of some folders, and the means of top-1 and top-5, in which each folder counts the same."""
    judged, files = (sum(getattr(score, key) for score in scores) for key in ("num_images", "num_files"))
    means = (statistics.fmean(getattr(score, key) for score in scores) for key in ("top1", "top5"))
    published *= len(scores)
    images = str(judged) if files == published else f"{judged} ({files} of {published} files)"
    return images, *(f"{mean:.2f}" for mean in means)


def robustness_as_json(evaluation: Evaluation) -> dict[str, object]:
    """All figures, for ``--json``: per cent, unrounded, and with every severity."""
    classifier = evaluation.classifier
    return {
        "variant": classifier.variant,
        "source": classifier.source,
        "img_size": list(classifier.img_size),
        "data_config": evaluation.data_config,
        "sets": {name: _as_json(result) for name, result in evaluation.sets.items()},
    }


def _as_json(result: SetResult) -> dict[str, object]:
    plain = dataclasses.asdict(dataclasses.replace(result, paper=None))
    return plain | {"paper": result.paper._asdict() if result.paper else None}
