"""The evaluation and the reports that go with a detector: its own, and no others."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from projects_vil import Detector, load_config
from projects_vil.checkpoint import fingerprint
from projects_vil.evaluation import write_results
from projects_vil.export import describe_report, export_detector
from projects_vil.inference.sharing.proofs import find_proofs
from tests.projects_vil.helpers import small_config
from tests.projects_vil.inference.helpers import picture, save


@pytest.fixture(scope="module")
def model(detector):
    return fingerprint(detector.runner.cfg, detector.runner.detector)


def test_those_of_the_detector(run, model):
    proofs = find_proofs(run, model)
    assert proofs.evaluation["mine"]["bbox"]["AP"] == 12.345 and proofs.evaluation["mine"]["bbox"]["APl"] is None
    assert list(proofs.reports) == ["model.ts.report.json"] and proofs.left_out == ()


@pytest.mark.slow
def test_those_that_the_tools_write(trained_run, tmp_path):
    """An evaluation of ``train_net.py``, and a report on an export that also names a photo of the user's."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    save(tmp_path / "photo.png", picture(64, 96))
    images = [tmp_path / "photo.png"]
    export_detector(load_config(run / "config.yaml"), run / "model_final.pth", run / "export", images=images, runs=1)
    detector = Detector.load(run, device="cpu")
    proofs = find_proofs(run, fingerprint(detector.runner.cfg, detector.runner.detector))
    assert proofs.left_out == () and list(proofs.evaluation) == ["shapes_val"]
    [report] = proofs.reports.values()
    assert describe_report(report) in str(detector.generate_model_card())


def test_there_may_be_none(tmp_path, model):
    proofs = find_proofs(tmp_path, model)
    assert (proofs.evaluation, proofs.reports, proofs.left_out) == (None, {}, ())


@pytest.mark.parametrize("change", ["weights", "threshold", "size"])
def test_those_of_another_are_named_and_left_out(change, own_run):
    overrides = {"size": ["INPUT.MIN_SIZE_TEST", 96]}.get(change, [])
    detector = Detector.load(own_run, overrides=overrides, score_threshold=0.5 if change == "threshold" else None)
    if change == "weights":
        with torch.no_grad():
            next(detector.runner.detector.parameters()).mul_(2)
    proofs = find_proofs(own_run, fingerprint(detector.runner.cfg, detector.runner.detector))
    assert proofs.evaluation is None and proofs.reports == {} and len(proofs.left_out) == 2
    assert "evaluation.json is of other weights, or of other settings" in proofs.left_out[0]
    assert proofs.left_out[1].startswith(f"export/model.ts.report.json in {own_run} is no report on these weights with")


def test_reports_of_others_are_named_in_one_line(own_run, model):
    for name in ("older.onnx", "older.xml"):
        (own_run / f"export/{name}.report.json").write_text("{}")
    proofs = find_proofs(own_run, model)
    assert list(proofs.reports) == ["model.ts.report.json"]
    [line] = proofs.left_out
    files = "export/older.onnx.report.json, export/older.xml.report.json"
    assert line == f"{files} in {own_run} are no reports on these weights with these settings: export again"


def test_an_evaluation_that_does_not_say_of_what_it_is(own_run, model):
    (own_run / "evaluation.model.json").unlink()
    proofs = find_proofs(own_run, model)
    assert proofs.evaluation is None and "does not say which model it is of" in proofs.left_out[0]


def test_paths_are_left_out(own_run, model):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(own_run), "DATASETS.TEST", '("/home/me/a.json",)')
    write_results(cfg, {"bbox": {"AP": 1.0}}, model=model)
    path = own_run / "export/model.ts.report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"file": "/home/me/model.ts"}))
    proofs = find_proofs(own_run, model)
    assert proofs.evaluation is None and proofs.reports == {}
    assert "a dataset that has a path for its name" in proofs.left_out[0] and "has a path in it" in proofs.left_out[1]
