"""A difference does not go unseen, and what two runtimes may do differently is no difference."""

import json
import math

import pytest
import torch
from torch import Tensor

from projects_vil.export.proof.parity import TOLERANCES, compare, compare_detections, describe, measure_latency

TOLERANCE = {"boxes": 0.01, "scores": 1e-4, "masks": 1e-3}


def detections(number: int = 5, *, masks: bool = False) -> dict[str, Tensor]:
    """Boxes far apart, scores 0.9, 0.8 ..., classes 0, 1, 2 by turns."""
    index = torch.arange(number)
    left = index * 20.0
    found = {
        "boxes": torch.stack([left, left + 3, left + 10, left + 8], dim=1),
        "scores": 0.9 - 0.1 * index,
        "classes": index % 3,
    }
    if masks:
        found["masks"] = torch.rand(number, 1, 6, 5, generator=torch.Generator().manual_seed(0))
    return found


def of(found: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in found.items()}


def changed(found: dict[str, Tensor], name: str, row: int, by: float) -> dict[str, Tensor]:
    value = found[name].clone()
    value[row] += by
    return found | {name: value}


def row(ours: dict, theirs: dict, *, threshold: float = 0.05, most: int = 100, tolerances=TOLERANCE) -> dict:
    return compare_detections(ours, theirs, tolerances=tolerances, score_threshold=threshold, max_detections=most)


# -- pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_the_order_does_not_matter(order, masks):
    found = detections(masks=masks)
    expected = {"detections": 5, "detections_exported": 5, "pairs": 5, "unmatched": 0, "changed": 0, "borderline": 0}
    expected["ok"] = True
    assert row(found, of(found, order)) == expected | {"boxes": 0, "scores": 0} | ({"masks": 0} if masks else {})


def test_the_same_box_of_two_classes():
    found = detections(2)
    found["boxes"][1] = found["boxes"][0]
    result = row(found, of(found, [1, 0]))
    assert result["ok"] and result["scores"] == 0
    assert not row(found, found | {"classes": torch.tensor([1, 0])})["ok"]


def test_the_nearest_of_a_class_is_the_partner():
    """Two of a class so close that either would do for the tolerance."""
    found = detections(4)
    found["classes"] = torch.tensor([0, 0, 1, 1])
    found["boxes"][1] = found["boxes"][0] + 0.006
    result = row(found, of(found, [1, 0, 3, 2]))
    assert result["ok"] and result["boxes"] == result["scores"] == 0


@pytest.mark.parametrize("name", ["boxes", "scores", "masks"])
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("factor, ok", [(-0.9, True), (0.9, True), (1.1, False), (-1.1, False), (30, False)])
def test_differences_up_to_the_tolerance(name, index, factor, ok):
    found, by = detections(masks=True), factor * TOLERANCE[name]
    result = row(found, of(changed(found, name, index, by), [3, 1, 0, 2, 4]))
    assert result["ok"] is ok and result["unmatched"] == 0
    assert result[name] == pytest.approx(abs(by), rel=0.02)
    assert all(result[other] == 0 for other in TOLERANCE if other != name)


def test_one_corner_of_one_box_is_enough():
    found, theirs = detections(), detections()
    theirs["boxes"][2, 3] += 0.4
    result = row(found, theirs)
    assert not result["ok"] and result["boxes"] == pytest.approx(0.4, rel=1e-4) and result["unmatched"] == 0


def test_another_class_leaves_both_alone():
    found = detections()
    other = found | {"classes": torch.tensor([0, 1, 7, 0, 1])}
    result = row(found, other)
    assert (result["ok"], result["unmatched"], result["boxes"], result["scores"]) == (False, 2, 0, 0)


def test_types_of_another_runtime():
    found = detections(masks=True)
    theirs = {name: value.double() if value.is_floating_point() else value.int() for name, value in found.items()}
    assert row(found, theirs)["ok"] and row(theirs, found)["ok"]


# -- without a partner -----------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("missing", [[4], [0], [1, 3]])
def test_a_missing_detection(missing, swap):
    found = detections()
    sides = [found, of(found, [i for i in range(5) if i not in missing])]
    result = row(*(reversed(sides) if swap else sides))
    assert (result["ok"], result["unmatched"], result["borderline"]) == (False, len(missing), 0)
    assert {result["detections"], result["detections_exported"]} == {5, 5 - len(missing)}


@pytest.mark.parametrize("sides", [(0, 5), (5, 0)])
@pytest.mark.parametrize("masks", [False, True])
def test_no_detection_on_one_side(sides, masks):
    found = detections(masks=masks)
    result = row(*(of(found, list(range(number))) for number in sides))
    assert (result["ok"], result["unmatched"], result["boxes"], result["scores"]) == (False, 5, 0, 0)
    assert (result["detections"], result["detections_exported"]) == sides


@pytest.mark.parametrize("masks", [False, True])
def test_no_detection_on_both_sides(masks):
    nothing = of(detections(masks=masks), [])
    result = row(nothing, nothing)
    assert result["ok"] and result["unmatched"] == result["borderline"] == result["detections"] == 0


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("above, ok", [(0.5e-4, True), (0.99e-4, True), (1.1e-4, False), (0.1, False)])
def test_at_the_threshold(above, ok, swap):
    """The last is in one answer and not in the other: by a rounding where its score is beside the threshold."""
    found = detections()
    threshold = found["scores"][-1].item() - above
    sides = [found, of(found, [0, 1, 2, 3])]
    result = row(*(reversed(sides) if swap else sides), threshold=threshold)
    assert (result["ok"], result["borderline"], result["unmatched"]) == (ok, int(ok), int(not ok))


@pytest.mark.parametrize("most, ok", [(5, True), (6, False), (100, False), (-1, False)])
def test_the_last_of_a_full_list(most, ok):
    """Two with nearly one score want the last place."""
    found = detections(6)
    found["scores"][5] = found["scores"][4] - 0.5e-4
    result = row(of(found, [0, 1, 2, 3, 4]), of(found, [0, 1, 2, 3, 5]), most=most)
    assert (result["ok"], result["borderline"]) == (ok, 2 if ok else 0)
    assert result["unmatched"] == (0 if ok else 2)


def test_a_full_list_excuses_only_its_end():
    found = detections(6)
    result = row(of(found, [0, 1, 2, 3, 4]), of(found, [0, 1, 2, 3, 5]), most=5)
    # Each is the last of its own list: what came in at the end may differ, what is above it may not.
    assert result["borderline"] == 2
    result = row(of(found, [0, 1, 2, 3, 4]), of(found, [0, 1, 5, 3, 4]), most=5)
    assert not result["ok"] and result["unmatched"] == 1 and result["borderline"] == 1


@pytest.mark.parametrize("share, ok", [(0.0, False), (0.39, False), (0.4, True)])
def test_a_share_of_the_detections_may_change(share, ok):
    """One of five is elsewhere, and one is gone."""
    found = detections(masks=True)
    other = of(found, [0, 1, 2, 4])
    other["boxes"] = other["boxes"].clone()
    other["boxes"][1] += 3
    limits = {"tolerances": TOLERANCE, "score_threshold": 0.05, "max_detections": 100}
    result = compare_detections(found, other, **limits, changed_share=share)
    assert (result["unmatched"], result["changed"], result["ok"]) == (1, 1, ok)


def test_many_scores_near_the_threshold_excuse_nothing():
    """Half precision's tolerance of scores is wide, and what excuses a detection is not."""
    found = detections()
    found["scores"] = torch.linspace(0.14, 0.06, 5)
    nothing = of(found, [])
    limits = {"tolerances": TOLERANCES["bf16"], "score_threshold": 0.05, "max_detections": 100, "changed_share": 0.1}
    assert not compare_detections(found, nothing, **limits)["ok"]


def test_a_borderline_pair_is_still_compared():
    """That a score is beside the threshold excuses what is missing, not what is wrong."""
    found = detections()
    threshold = found["scores"][-1].item() - 0.5e-4
    result = row(found, changed(found, "scores", 4, 3e-4), threshold=threshold)
    assert not result["ok"] and result["borderline"] == 0 and result["scores"] == pytest.approx(3e-4, rel=1e-2)
    result = row(found, changed(found, "boxes", 4, 5.0), threshold=threshold)
    assert result["borderline"] == 2 and result["ok"]


# -- what is not a number --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["boxes", "scores", "masks"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("swap", [False, True])
def test_what_is_not_a_number_is_a_difference(name, value, swap):
    found, broken = detections(masks=True), detections(masks=True)
    broken[name][1] = value
    result = row(*((broken, found) if swap else (found, broken)))
    assert not result["ok"]


def test_all_not_numbers_on_both_sides():
    broken = {name: value * math.nan if value.is_floating_point() else value for name, value in detections().items()}
    assert not row(broken, broken)["ok"]


# -- tolerances ------------------------------------------------------------------------------------


def test_tolerances_widen_with_the_precision():
    assert set(TOLERANCES) == {"fp32", "fp16", "bf16", "int8"}
    for name in ("boxes", "scores", "masks"):
        assert 0 < TOLERANCES["fp32"][name] < TOLERANCES["fp16"][name] < TOLERANCES["bf16"][name]


def test_without_a_verdict():
    found = detections()
    other = changed(found, "boxes", 0, 2.5)
    thresholds = {"score_threshold": 0.05, "max_detections": 100}
    judged = compare_detections(found, other, tolerances=TOLERANCE, changed_share=None, **thresholds)
    assert judged["ok"] is None and judged["unmatched"] + judged["changed"] == 1
    text, ok = describe([judged | {"height": 1, "width": 2}], TOLERANCES["int8"])
    assert ok and "qual" not in text.lower()


@pytest.mark.parametrize("precision, ok", [("fp32", False), ("fp16", False), ("bf16", True)])
def test_of_a_precision(precision, ok):
    found = detections()
    assert row(found, changed(found, "boxes", 0, 2.5), tolerances=TOLERANCES[precision])["ok"] is ok


# -- images ----------------------------------------------------------------------------------------


def test_both_run_on_each_image():
    images = [torch.zeros(3, 40, 60, dtype=torch.uint8), torch.ones(3, 70, 50, dtype=torch.uint8)]
    found = detections()

    def worse_where_bright(image: Tensor) -> dict[str, Tensor]:
        return changed(found, "boxes", 1, 3.0 * image.max().item())

    rows = compare(
        lambda image: found, worse_where_bright, images, tolerances=TOLERANCE, score_threshold=0.05, max_detections=100
    )
    assert [(row["height"], row["width"], row["ok"]) for row in rows] == [(40, 60, True), (70, 50, False)]
    assert [row["boxes"] for row in rows] == [0, 3]
    assert json.loads(json.dumps(rows)) == rows


def a_row(ok: bool = True, **changes) -> dict:
    found = {"detections": 3, "detections_exported": 4, "unmatched": 0, "changed": 0, "borderline": 0}
    found |= {"pairs": 3, "boxes": 0.5, "scores": 2e-6}
    return {"height": 64, "width": 90} | found | {"ok": ok} | changes


def test_rows_as_text():
    rows = [a_row(masks=0.25), a_row(ok=False, unmatched=2, changed=1, borderline=1, height=7)]
    text, proven = describe(rows, TOLERANCE)
    assert text.splitlines() == [
        "64 x 90: 3 detections, 4 exported; largest difference: boxes 5.0e-01, scores 2.0e-06, masks 2.5e-01; equal",
        "7 x 90: 3 detections, 4 exported, 2 unmatched, 1 changed, 1 borderline; "
        "largest difference: boxes 5.0e-01, scores 2.0e-06; NOT EQUAL",
    ]
    assert not proven
    assert describe(rows[:1], TOLERANCE)[1]
    assert describe([a_row(), a_row(pairs=0)], TOLERANCE)[1]


@pytest.mark.parametrize("rows", [[], [a_row(pairs=0)], [a_row(pairs=0)] * 2])
def test_no_detection_proves_nothing(rows):
    text, proven = describe(rows, TOLERANCE)
    assert not proven and text.splitlines()[-1].startswith("NOT PROVEN: ") and "--images" in text
    assert len(text.splitlines()) == len(rows) + 1


# -- latency ---------------------------------------------------------------------------------------


def test_latency():
    calls = []

    def busy(name: str, rounds: int):
        def run(image: Tensor) -> dict[str, Tensor]:
            calls.append(name)
            for _ in range(rounds):
                image = image @ image
            return {}

        return run

    image = torch.eye(300)[None]
    latency = measure_latency(busy("eager", 20), busy("exported", 1), image, runs=3)
    # By turns, and once more than is counted.
    assert calls == ["eager", "exported"] * 4
    assert latency["eager_ms"] > latency["exported_ms"] > 0 and latency["ratio"] > 2
    assert latency["ratio"] == pytest.approx(latency["eager_ms"] / latency["exported_ms"], rel=0.02)
    assert (latency["height"], latency["width"]) == (300, 300) and latency["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(latency)) == latency
