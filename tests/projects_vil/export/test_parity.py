"""The parity check reports every difference, except those that rounding in two runtimes explains."""

import copy
import json
import math
import re

import cv2
import pytest
import torch
from torch import Tensor

from projects_vil.export import ExportedModel, describe_report, parity
from projects_vil.export.parity import TOLERANCES, check_export, compare_detections, parity_images
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import small_config


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
    """Compare in both directions, and check that they agree."""
    thresholds = {"score": threshold, "detections_per_image": most}
    found = compare_detections(ours, theirs, precision, thresholds)
    other = compare_detections(theirs, ours, precision, thresholds)
    assert [found[key] for key in KEYS] == [other[key] for key in KEYS]
    return json.loads(json.dumps(found))


KEYS = ("unmatched", "borderline", "changed", "pairs")
FOUND, MANY = detections(), detections(20) | {"scores": torch.linspace(0.9, 0.06, 20)}
LAST = FOUND["scores"][-1].item()
CONVERTED = {name: value.double() if value.is_floating_point() else value.int() for name, value in FOUND.items()}
MISSING = changed(of(MANY, [*range(10), *range(11, 20)]), "boxes", 1, 3)
# Two detections of a class that are close enough for either to match, and one with another class.
CLOSE = FOUND | {"classes": torch.tensor([0, 0, 1, 1, 2])}
CLOSE["boxes"] = torch.cat([CLOSE["boxes"][:1], CLOSE["boxes"][:1] + 0.006, CLOSE["boxes"][2:]])
# The end of a full list: its last two scores are closer than the borderline.
LIST = detections(6)
LIST["scores"][5] = LIST["scores"][4] - 0.5e-4


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "ok", "counts"),
    [
        (FOUND, of(CONVERTED, [2, 0, 4, 1, 3]), {}, True, (0, 0, 0, 5)),
        (CLOSE, CLOSE | {"classes": torch.tensor([0, 0, 7, 1, 2])}, {}, False, (2, 0, 0, 4)),
        (FOUND, of(FOUND, []), {}, False, (5, 0, 0, 0)),
        (FOUND, of(FOUND, [0, 2, 4]), {}, False, (2, 0, 0, 3)),
        # A missing detection at the threshold is borderline; a changed one is not.
        (FOUND, of(FOUND, [0, 1, 2, 3]), {"threshold": LAST - 0.5e-4}, True, (0, 1, 0, 4)),
        (FOUND, of(FOUND, [0, 1, 2, 3]), {"threshold": LAST - 1.1e-4}, False, (1, 0, 0, 4)),
        (FOUND, changed(FOUND, "scores", 4, 3e-4), {"threshold": LAST - 0.5e-4}, False, (0, 0, 1, 5)),
        # Only the last entries of a full list are borderline.
        (of(LIST, [0, 1, 2, 3, 4]), of(LIST, [0, 1, 2, 3, 5]), {"most": 5}, True, (0, 2, 0, 4)),
        (of(LIST, [0, 1, 2, 3, 4]), of(LIST, [0, 1, 5, 3, 4]), {"most": 5}, False, (1, 1, 0, 4)),
        (of(LIST, [0, 1, 2, 3, 4]), of(LIST, [0, 1, 2, 3, 5]), {"most": -1}, False, (2, 0, 0, 4)),
        # In half precision a tenth may change, but the margin at the threshold does not widen.
        (MANY, MISSING, {"precision": "fp16"}, True, (1, 0, 1, 19)),
        (MANY, changed(MISSING, "boxes", 5, 3), {"precision": "fp16"}, False, (1, 0, 2, 19)),
        (MANY, of(MANY, list(range(17))), {"precision": "bf16"}, False, (3, 0, 0, 17)),
        *(
            (FOUND, changed(FOUND, "boxes", 0, 2.5), {"precision": precision}, ok, (0, 0, int(not within), 5))
            for precision, ok, within in (("fp16", False, False), ("bf16", True, True), ("int8", None, True))
        ),
    ],
)
def test_pairs(ours, theirs, options, ok, counts):
    result = row(ours, theirs, **options)
    assert (result["ok"], tuple(result[key] for key in KEYS)) == (ok, counts)
    assert (result["detections"], result["detections_exported"]) == (len(ours["scores"]), len(theirs["scores"]))
    if counts == (0, 0, 0, 5) and not options:
        assert result["boxes"] == result["scores"] == result["masks"] == 0


@pytest.mark.parametrize("name", ["boxes", "scores", "masks"])
def test_differences_of_values(name):
    for factor, ok in ((-0.9, True), (1.1, False), (30, False)):
        by = factor * TOLERANCES["fp32"][name]
        result = row(FOUND, of(changed(FOUND, name, 3, by), [3, 1, 0, 2, 4]))
        assert result["ok"] is ok and result["unmatched"] == 0
        assert result[name] == pytest.approx(abs(by), rel=0.02)
        assert all(result[other] == 0 for other in TOLERANCES["fp32"] if other != name)
    for value in (math.nan, math.inf):
        broken = detections()
        broken[name][1] = value
        assert not row(FOUND, broken)["ok"]
    broken = {name: value * math.nan if value.is_floating_point() else value for name, value in FOUND.items()}
    assert not row(broken, broken)["ok"]


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "precision", "expected"),
    [
        (FOUND, "fp32", ""),
        # The suppressed one of two boxes with equal scores.
        (changed(FOUND, "boxes", 1, 3), "fp32", "1 of 5 detections differ, but not.*--evaluate.*--parity-images"),
        (MISSING, "fp32", "2 of 19 detections differ. After rounding.*--evaluate"),
        (FOUND | {"boxes": FOUND["boxes"] + 3}, "fp32", "the exported model has other detections.*Do not use the file"),
        (changed(FOUND, "scores", 1, 0.01), "fp32", "the exported model has other detections.*Do not use the file"),
        (changed(FOUND, "scores", 1, 0.05), "fp16", ".* in precision fp16.*--precision fp32"),
    ],
)
def test_a_difference_has_advice(theirs, precision, expected):
    latency = {"height": 1, "width": 2, "exported_ms": 1.0, "eager_ms": 1.0, "ratio": 1.0, "threads": 1}
    facts = {"file": "model.ts", "runtime": "torch 2", "opset": None, "precision": precision, "bytes": 1}
    found = row(MANY if theirs is MISSING else FOUND, theirs, precision) | {"file": "b.jpg", "height": 1, "width": 2}
    facts |= {"images": [found], "latency": latency, "tolerances": TOLERANCES[precision]}
    text = describe_report(facts)
    assert re.search(f"^b.jpg, 1 .*\nNOT EQUAL means that {expected}", text) if expected else "NOT EQUAL" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer", "change"),
    [
        ("retinanet", "head.bbox_pred.bias", 0.01),
        ("retinanet", "head.cls_score.bias", 0.003),
        ("mask_rcnn", "mask_head.predictor.bias", 0.05),
    ],
)
def test_an_export_of_slightly_other_weights_is_not_ok(exported, name, layer, change):
    model, cfg = ExportedModel(exported(name)[0]), small_config(name)
    other = copy.deepcopy(demo_detector(name))
    with torch.no_grad():
        (parameter,) = (parameter for key, parameter in other.named_parameters() if key.endswith(layer))
        parameter += change
    assert check_export(cfg, other, model, parity_images(cfg)[:2])["ok"] is False


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "ok"), [(0.1, True), (-1.0, False)])
def test_average_precision_of_both(shapes, exported, monkeypatch, tolerance, ok):
    monkeypatch.setattr(parity, "AP_TOLERANCE", tolerance)
    cfg = small_config("mask_rcnn")
    model = ExportedModel(exported("mask_rcnn")[0])
    report = check_export(cfg, demo_detector("mask_rcnn"), model, parity_images(cfg)[:1], evaluate=True)
    rows = [(row["dataset"], row["task"], row["ok"]) for row in report["evaluation"]]
    assert rows == [("shapes_val", task, ok) for task in ("bbox", "segm")] and report["ok"] is ok
    assert all(row["AP"] == row["AP_exported"] is not None for row in report["evaluation"])
    assert all(row["ok"] for row in report["images"]) and "shapes_val, segm: AP " in describe_report(report)


def test_parity_images(shapes):
    _, images = zip(*parity_images(small_config("retinanet", "DATASETS.TEST", "()")), strict=True)
    assert [tuple(image.shape[1:]) for image in images] == [(64, 96), (85, 64), (64, 107), (35, 35)]
    files = sorted(map(str, (shapes / "val").iterdir()))
    # By default, images of the validation dataset come first.
    assert [name for name, _ in parity_images(small_config())] == [*files[::2], "synthetic image", "synthetic image"]
    # Images of the dataset must be like tiles, and have a size that the model accepts.
    for key, value, sides in (("TEST.TILE_SIZE", "64", (32, 700)), ("INPUT.MIN_SIZE_TEST", "0", (200, 700))):
        named = parity_images(small_config("retinanet", key, value), sides=sides)
        assert {name for name, _ in named} == {"synthetic image"}
    means = torch.from_numpy(cv2.imread(files[0]).mean(axis=(0, 1))).float()
    for channels, expected in (("BGR", means), ("RGB", means.flip(0))):
        cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48", "INPUT.FORMAT", channels)
        ((_, image),) = parity_images(cfg, [files[0]])
        assert (len(image), min(image.shape[1:]), image.dtype) == (3, 48, torch.uint8)
        torch.testing.assert_close(image.float().mean(dim=(1, 2)), expected, atol=2, rtol=0)
