"""The parity check reports every difference, except for those that rounding in two runtimes explains."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor

from projects_vil.export import ExportedModel, compare, describe_report, is_equal, parity
from projects_vil.export.images import comparison_images
from projects_vil.export.parity import TOLERANCES, check_export, compare_detections
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import small_config

THRESHOLDS = {"score": 0.05, "detections_per_image": 100}


def detections(number: int = 5) -> dict[str, Tensor]:
    """Boxes far apart, scores 0.9, 0.8 ..., classes 0, 1, 2, 0, 1."""
    index = torch.arange(number)
    left = index * 20.0
    return {
        "boxes": torch.stack([left, left + 3, left + 10, left + 8], dim=1),
        "scores": 0.9 - 0.1 * index,
        "classes": index % 3,
        "masks": torch.rand(number, 1, 6, 5, generator=torch.Generator().manual_seed(0)),
    }


def of(found: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: value[rows] for name, value in found.items()}


def changed(found: dict[str, Tensor], name: str, row: int, by: float) -> dict[str, Tensor]:
    value = found[name].clone()
    value[row] += by
    return found | {name: value}


def row(ours: dict, theirs: dict, precision: str = "fp32", *, threshold: float = 0.05, most: int = 100) -> dict:
    """Compare both ways, and check that they agree."""
    thresholds = {"score": threshold, "detections_per_image": most}
    found = compare_detections(ours, theirs, precision, thresholds)
    other = compare_detections(theirs, ours, precision, thresholds)
    keys = ("unmatched", "borderline", "changed", "pairs")
    assert {key: found[key] for key in keys} == {key: other[key] for key in keys}
    return found


# -- pairs -----------------------------------------------------------------------------------------


def test_the_order_and_the_types_do_not_matter():
    found = detections()
    theirs = {name: value.double() if value.is_floating_point() else value.int() for name, value in found.items()}
    expected = {"detections": 5, "detections_exported": 5, "pairs": 5, "unmatched": 0, "changed": 0, "borderline": 0}
    expected |= {"ok": True, "boxes": 0, "scores": 0, "masks": 0}
    for other in (of(found, [4, 3, 2, 1, 0]), of(theirs, [2, 0, 4, 1, 3])):
        assert row(found, other) == expected


def test_partners_are_the_nearest_of_a_class():
    found = detections(4)
    found["boxes"][1] = found["boxes"][0]
    result = row(found, of(found, [1, 0, 3, 2]))
    assert result["ok"] and result["scores"] == 0
    # Two of a class so close that either would do.
    found["classes"] = torch.tensor([0, 0, 1, 1])
    found["boxes"][1] = found["boxes"][0] + 0.006
    result = row(found, of(found, [1, 0, 3, 2]))
    assert result["ok"] and result["boxes"] == result["scores"] == 0
    result = row(found, found | {"classes": torch.tensor([0, 0, 7, 1])})
    assert (result["ok"], result["unmatched"], result["boxes"], result["scores"]) == (False, 2, 0, 0)


@pytest.mark.parametrize("name", ["boxes", "scores", "masks"])
@pytest.mark.parametrize(("factor", "ok"), [(-0.9, True), (1.1, False), (30, False)])
def test_differences_up_to_the_tolerance(name, factor, ok):
    found, by = detections(), factor * TOLERANCES["fp32"][name]
    result = row(found, of(changed(found, name, 3, by), [3, 1, 0, 2, 4]))
    assert result["ok"] is ok and result["unmatched"] == 0
    assert result[name] == pytest.approx(abs(by), rel=0.02)
    assert all(result[other] == 0 for other in TOLERANCES["fp32"] if other != name)


@pytest.mark.parametrize("name", ["boxes", "scores", "masks"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_a_difference(name, value):
    found, broken = detections(), detections()
    broken[name][1] = value
    assert not row(found, broken)["ok"]
    broken = {name: value * math.nan if value.is_floating_point() else value for name, value in found.items()}
    assert not row(broken, broken)["ok"]


def test_tolerances_of_a_precision():
    found, shifted = detections(), changed(detections(), "boxes", 0, 2.5)
    assert [row(found, shifted, precision)["ok"] for precision in TOLERANCES] == [False, False, True, None]


# -- without a partner -----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 2, 4], []])
def test_missing_detections(kept):
    found = detections()
    result = row(found, of(found, kept))
    assert (result["ok"], result["unmatched"], result["borderline"]) == (False, 5 - len(kept), 0)
    assert (result["detections"], result["detections_exported"]) == (5, len(kept))
    assert row(of(found, []), of(found, []))["ok"]


@pytest.mark.parametrize(("above", "ok"), [(0.5e-4, True), (1.1e-4, False)])
def test_at_the_threshold(above, ok):
    """The last detection is missing in one result: rounding explains it only if its score is at the threshold."""
    found = detections()
    threshold = found["scores"][-1].item() - above
    result = row(found, of(found, [0, 1, 2, 3]), threshold=threshold)
    assert (result["ok"], result["borderline"], result["unmatched"]) == (ok, int(ok), int(not ok))
    # Only a missing detection is borderline, not one with other values.
    result = row(found, changed(found, "scores", 4, 3e-4), threshold=threshold)
    assert not result["ok"] and result["borderline"] == 0 and result["scores"] == pytest.approx(3e-4, rel=1e-2)


@pytest.mark.parametrize(("most", "ok"), [(5, True), (6, False), (-1, False)])
def test_the_last_of_a_full_list(most, ok):
    found = detections(6)
    found["scores"][5] = found["scores"][4] - 0.5e-4
    result = row(of(found, [0, 1, 2, 3, 4]), of(found, [0, 1, 2, 3, 5]), most=most)
    assert (result["ok"], result["borderline"], result["unmatched"]) == (ok, *((2, 0) if ok else (0, 2)))
    if ok:
        # The end of the list may differ, but not the entries above it.
        result = row(of(found, [0, 1, 2, 3, 4]), of(found, [0, 1, 5, 3, 4]), most=5)
        assert not result["ok"] and (result["unmatched"], result["borderline"]) == (1, 1)


def test_a_share_of_the_detections_may_change_in_half_precision():
    found = detections(20)
    found["scores"] = torch.linspace(0.9, 0.06, 20)
    missing = changed(of(found, [*range(10), *range(11, 20)]), "boxes", 1, 3)
    result = row(found, missing, "fp16")
    assert (result["unmatched"], result["changed"], result["ok"]) == (1, 1, True)
    assert not row(found, changed(missing, "boxes", 5, 3), "fp16")["ok"]
    # The wide tolerance of half precision's scores does not widen the margin at the threshold.
    assert not row(found, of(found, list(range(17))), "bf16")["ok"]


# -- reports ---------------------------------------------------------------------------------------


def test_images_without_detections_are_not_equal():
    images = [torch.zeros(3, 40, 60, dtype=torch.uint8), torch.ones(3, 70, 50, dtype=torch.uint8)]
    found = detections()
    changes = lambda image: changed(found, "boxes", 1, 3 * image.max().item())  # noqa: E731
    rows = compare(lambda image: found, changes, images, "fp32", THRESHOLDS)
    assert [(row["height"], row["width"], row["ok"]) for row in rows] == [(40, 60, True), (70, 50, False)]
    assert [row["boxes"] for row in rows] == [0, 3] and json.loads(json.dumps(rows)) == rows
    assert is_equal(rows[:1]) and not is_equal(rows)
    nothing = compare(lambda image: of(found, []), lambda image: of(found, []), images, "fp32", THRESHOLDS)
    assert all(row["ok"] for row in nothing) and not is_equal(nothing) and is_equal([rows[0], *nothing])


@pytest.mark.parametrize(
    ("name", "layer", "change"),
    [
        ("retinanet", "head.bbox_pred.bias", 0.01),
        ("retinanet", "head.cls_score.bias", 0.003),
        pytest.param("mask_rcnn", "mask_head.predictor.bias", 0.05, marks=pytest.mark.slow),
    ],
)
def test_an_export_of_slightly_other_weights_is_not_ok(exported, name, layer, change):
    model, cfg = ExportedModel(exported(name)[0]), small_config(name)
    other = copy.deepcopy(demo_detector(name))
    with torch.no_grad():
        (parameter,) = (parameter for key, parameter in other.named_parameters() if key.endswith(layer))
        parameter += change
    assert check_export(cfg, other, model, comparison_images(cfg)[:2])["ok"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "ok"), [(0.1, True), (-1.0, False)])
def test_average_precision_of_both(shapes, exported, monkeypatch, tolerance, ok):
    monkeypatch.setattr(parity, "AP_TOLERANCE", tolerance)
    cfg = small_config("mask_rcnn")
    model = ExportedModel(exported("mask_rcnn")[0])
    report = check_export(cfg, demo_detector("mask_rcnn"), model, comparison_images(cfg)[:1], evaluate=True)
    rows = [(row["dataset"], row["task"], row["ok"]) for row in report["evaluation"]]
    assert rows == [("shapes_val", task, ok) for task in ("bbox", "segm")] and report["ok"] is ok
    assert all(row["AP"] == row["AP_exported"] is not None for row in report["evaluation"])
    assert all(row["ok"] for row in report["images"]) and "shapes_val, segm: AP " in describe_report(report)
