"""Whether two detectors give the same answers: detections are paired, and how far the pairs are apart is measured."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# The largest differences that count as the same answer: boxes in pixels, scores and masks in probability. In half
# precision they are what the rounding of the model makes.
TOLERANCES = {
    "fp32": {"boxes": 1e-2, "scores": 1e-4, "masks": 1e-3},
    "fp16": {"boxes": 1.0, "scores": 2e-2, "masks": 5e-2},
    "bf16": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
    "int8": {"boxes": 4.0, "scores": 1e-1, "masks": 2e-1},
}
# The share of an image's detections that may differ by more: rounding makes non-maximum suppression take another of two
# candidates that are nearly equal. None: int8 is judged by its average precision, and not by pairs.
CHANGED_SHARE = {"fp32": 0.0, "fp16": 0.1, "bf16": 0.1, "int8": None}
# How near a score is to the threshold, or to the last place of a full list, to be in one answer only.
BORDERLINE = TOLERANCES["fp32"]["scores"]
Detections = Mapping[str, Tensor]
_VERDICTS = {True: "; equal", False: "; NOT EQUAL", None: ""}
Detector = Callable[[Tensor], Detections]


def compare(
    reference: Detector,
    exported: Detector,
    images: Sequence[Tensor],
    *,
    tolerances: Mapping[str, float],
    score_threshold: float,
    max_detections: int,
    changed_share: float | None = 0.0,
) -> list[dict]:
    """Run both on each image (3, H, W), see :func:`compare_detections`, and add the image's height and width."""
    rows = []
    for image in images:
        row = compare_detections(
            reference(image),
            exported(image),
            tolerances=tolerances,
            score_threshold=score_threshold,
            max_detections=max_detections,
            changed_share=changed_share,
        )
        rows.append({"height": image.shape[-2], "width": image.shape[-1]} | row)
    return rows


def compare_detections(
    ours: Detections,
    theirs: Detections,
    *,
    tolerances: Mapping[str, float],
    score_threshold: float,
    max_detections: int,
    changed_share: float | None = 0.0,
) -> dict:
    """How far two answers for one image are apart.

    Detections are paired by class and box, not by their place: two scores that differ in the last digit change places
    in another runtime. A detection without a partner is excused where its score is within ``BORDERLINE`` of the
    threshold or, in a full list, of the lowest score that came into it.

    Args:
        ours, theirs: boxes (D, 4), scores (D,), classes (D,), and masks (D, 1, S, S) or none.
        tolerances: of boxes (pixels), scores and masks.
        score_threshold: of the detector.
        max_detections: of an image.
        changed_share: of the detections that may be unmatched or changed; None for no verdict.

    Returns:
        ``detections`` and ``detections_exported``; ``pairs`` of them; ``unmatched``, those without a partner of their
        class and without an excuse; ``borderline``, those excused; ``changed``, pairs that differ by more than a
        tolerance; the largest difference of boxes, scores and masks in the pairs; ``ok``, None without a verdict.
    """
    distance = (ours["boxes"].float()[:, None] - theirs["boxes"].float()).abs().amax(2)
    # What is not a number is no match.
    distance = distance.nan_to_num(nan=torch.inf)
    distance = distance.masked_fill(ours["classes"][:, None] != theirs["classes"], torch.inf)
    pairs = _pair(distance, at_most=tolerances["boxes"])
    left = [set(range(side)) - {pair[i] for pair in pairs} for i, side in enumerate(distance.shape)]
    excused = [
        {i for i in rest if _is_borderline(answer["scores"], i, score_threshold, max_detections)}
        for rest, answer in zip(left, (ours, theirs), strict=True)
    ]
    # Those that should have been pairs, so that the report says how far they are apart.
    closed = distance.clone()
    for axis, (rest, spared) in enumerate(zip(left, excused, strict=True)):
        taken = torch.tensor(sorted(set(range(distance.shape[axis])) - (rest - spared)), dtype=torch.long)
        closed.index_fill_(axis, taken, torch.inf)
    pairs += _pair(closed, at_most=torch.finfo(torch.float32).max)
    matched = [{pair[i] for pair in pairs} for i in (0, 1)]
    row: dict = {
        "detections": len(ours["scores"]),
        "detections_exported": len(theirs["scores"]),
        "pairs": len(pairs),
        "unmatched": sum(len(rest - spared - pair) for rest, spared, pair in zip(left, excused, matched, strict=True)),
        "borderline": sum(map(len, excused)),
    }
    mine, other = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
    is_equal = torch.ones(len(pairs), dtype=torch.bool)
    for name in tolerances:
        if name in ours:
            difference = (ours[name][mine].float() - theirs[name][other].float()).abs()
            row[name] = difference.max().item() if difference.numel() else 0.0
            is_equal &= (difference <= tolerances[name]).view(len(pairs), *difference.shape[1:], 1).flatten(1).all(1)
    row["changed"] = int((~is_equal).sum())
    row["ok"] = (
        None if changed_share is None else row["unmatched"] + row["changed"] <= changed_share * row["detections"]
    )
    return row


def _pair(distance: Tensor, *, at_most: float) -> list[tuple[int, int]]:
    """The nearest partner of each row, first come first served: (row, column)."""
    free, pairs = distance.clone(), []
    for row in range(len(free)):
        if free.shape[1] and free[row].min() <= at_most:
            column = int(free[row].argmin())
            pairs.append((row, column))
            free[:, column] = torch.inf
    return pairs


def _is_borderline(scores: Tensor, index: int, threshold: float, max_detections: int) -> bool:
    is_full = 0 <= max_detections <= len(scores)
    return bool(scores[index] <= threshold + BORDERLINE or (is_full and scores[index] <= scores.min() + BORDERLINE))


def describe(rows: Sequence[dict], tolerances: Mapping[str, float]) -> tuple[str, bool]:
    """The rows of :func:`compare` as text, and whether they prove that the answers are the same."""
    lines = []
    for row in rows:
        differences = ", ".join(f"{name} {row[name]:.1e}" for name in tolerances if name in row)
        extra = "".join(f", {row[name]} {name}" for name in ("unmatched", "changed", "borderline") if row[name])
        lines.append(
            f"{row['height']} x {row['width']}: {row['detections']} detections, {row['detections_exported']} exported"
            f"{extra}; largest difference: {differences}{_VERDICTS[row['ok']]}"
        )
    compared = any(row["pairs"] for row in rows)
    if not compared:
        lines.append("NOT PROVEN: no detection of both on these images; name some of your own with --images")
    return "\n".join(lines), compared and all(row["ok"] is not False for row in rows)


def measure_latency(reference: Detector, exported: Detector, image: Tensor, *, runs: int = 5) -> dict[str, float]:
    """Median milliseconds of both on one image, by turns, and the ratio of these: above 1 the export is faster."""
    times: list[list[float]] = [[], []]
    for _ in range(runs + 1):
        for detector, own in zip((reference, exported), times, strict=True):
            start = time.perf_counter()
            detector(image)
            own.append(1000 * (time.perf_counter() - start))
    eager, ours = (statistics.median(own[1:]) for own in times)  # the first of each does not count
    return {
        "eager_ms": round(eager, 3),
        "exported_ms": round(ours, 3),
        "ratio": round(eager / ours, 3),
        "height": image.shape[-2],
        "width": image.shape[-1],
        "threads": torch.get_num_threads(),
    }
