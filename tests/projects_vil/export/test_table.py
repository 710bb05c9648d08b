"""The table of exports: each cell is measured, what fails says why and does not stop the others."""

import importlib.util
import json
import runpy
import sys

import pytest
import torch

from backbones import InputError
from projects_vil.export import ExportedModel, table
from tests.projects_vil.helpers import ROOT, SMALL, small_config

# SMALL's threshold is low, so that there is something in the empty image too.
OVERRIDES = SMALL["retinanet"]
ROW = {"height": 64, "width": 96, "detections": 7, "detections_exported": 7}
ROW |= {"unmatched": 0, "borderline": 0, "changed": 0, "boxes": 1.5e-5, "scores": 3e-7, "ok": True}
LATENCY = {"eager_ms": 45.4, "exported_ms": 53.1, "ratio": 0.86, "height": 64, "width": 96, "threads": 1}


def cell(**changes) -> dict:
    return {
        "detector": "retinanet",
        "family": "lit",
        "format": "onnx",
        "precision": "fp32",
        "trained": True,
        "backbone": "lit_ti",
        "ok": True,
        "images": [ROW, ROW | {"detections": 0, "boxes": 2e-5, "height": 96, "width": 128}],
        "latency": LATENCY,
        "seconds": 1.0,
    } | changes


def failed(**changes) -> dict:
    measured = ("images", "latency")
    return {key: value for key, value in cell(**changes).items() if key not in measured} | {"ok": False}


def export(output, **changes) -> list[dict]:
    options = {"detectors": ["retinanet"], "families": ["vil"], "formats": ["torchscript"], "overrides": OVERRIDES}
    return table.export_table(output, **options | changes)


@pytest.mark.slow
def test_a_trained_run_is_exported_and_compared(tmp_path, capsys):
    run = tmp_path / "runs/retinanet_vil"
    run.mkdir(parents=True)
    cfg = small_config("retinanet", "MODEL.RETINANET.NUM_CLASSES", "5")
    (run / "config.yaml").write_text(cfg.dump())
    torch.save({"model": table.lively_detector(cfg).state_dict()}, run / "model_final.pth")

    (found,) = export(tmp_path / "out", runs=tmp_path / "runs")
    assert found["ok"] and found["trained"] and found["backbone"] == "vil_tiny_1_1_3_1_rpb"
    sizes = [(row["height"], row["width"]) for row in found["images"]]
    assert sizes[-2:] == [(64, 64), (96, 128)] and any(h > w for h, w in sizes) and any(h < w for h, w in sizes)
    assert all(row["ok"] and row["detections"] for row in found["images"][:-1])
    model = ExportedModel(tmp_path / "out/retinanet_vil/model.ts")
    assert len(model.metadata["classes"]) == 5 and found["bytes"] == model.path.stat().st_size
    err = capsys.readouterr().err
    assert "warning: " not in err and "[1/1] retinanet vil torchscript: box " in err


@pytest.mark.slow
def test_the_tool_prints_a_table_and_fails_where_a_cell_fails(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    # Nothing can be written where a folder lies.
    (output / "retinanet_vil/model.ts").mkdir(parents=True)
    options = ["--formats", "torchscript", "--families", "vil", "ls", "--detectors", "retinanet"]
    args = [*options, "--output", output, "--json", tmp_path / "table.json", "--opts", *OVERRIDES]
    monkeypatch.setattr(sys, "argv", list(map(str, ["export_table.py", *args])))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tools/export_table.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert "warning: retinanet_ls has random weights" in err and "[2/2] retinanet ls torchscript: box " in err
    header, _, failing, equal, *_ = out.splitlines()
    assert header == "| detector | backbone | weights | torchscript |"
    assert failing.startswith("| retinanet | vil_tiny_1_1_3_1_rpb | random | FAILED: InputError: cannot write ")
    assert equal.startswith("| retinanet | ls_tiny | random | box ")
    assert "Traceback" in (output / "retinanet_vil/torchscript.error.txt").read_text()
    cells = json.loads((tmp_path / "table.json").read_text())
    assert [found["ok"] for found in cells] == [False, True]


def test_a_cell_as_text():
    assert table.describe_cell(cell()) == "box 2.0e-05 px, score 3.0e-07; 53 ms (eager 45)"
    masks = [ROW | {"masks": 2e-6}, ROW | {"masks": 1e-6}]
    assert table.describe_cell(cell(images=masks)) == "box 1.5e-05 px, score 3.0e-07, mask 2.0e-06; 53 ms (eager 45)"
    different = cell(ok=False, images=[ROW | {"unmatched": 2}, ROW | {"unmatched": 1, "changed": 4}])
    assert table.describe_cell(different).startswith(
        "NOT EQUAL: box 1.5e-05 px, score 3.0e-07, 3 of 14 unmatched, 4 of 14 changed; "
    )
    assert table.describe_cell(failed(error="ValueError: no")) == "FAILED: ValueError: no"


def test_a_table_has_a_row_for_each_detector_and_a_column_for_each_format():
    cells = [cell(), failed(format="torchscript", error="OSError: a|b"), cell(family="ls", backbone="ls_tiny")]
    cells += [cell(family="ls", backbone="ls_tiny", format="torchscript", trained=False)]
    lines = table.describe_table(cells).splitlines()
    text = table.describe_cell(cell())
    assert lines[:4] == [
        "| detector | backbone | weights | onnx | torchscript |",
        "|---|---|---|---|---|",
        f"| retinanet | lit_ti | trained | {text} | FAILED: OSError: a\\|b |",
        f"| retinanet | ls_tiny | trained | {text} | {text} |",
    ]
    assert "64 x 96" in lines[-1] and "3 of 3 cells have no detection" in lines[-1]


def test_formats_depend_on_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    own = ("torchscript", "onnx", "torch_export")
    assert table.available_formats() == own + ("openvino",) * (importlib.util.find_spec("openvino") is not None)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        table.export_table("unused", formats=["aot_inductor"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"families": ["vill"]}, "unknown backbone family 'vill'"),
        ({"detectors": ["mask"]}, "unknown detector 'mask'"),
        ({"formats": ["onxx"]}, "unknown format 'onxx'"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"runs": "no/such/folder"}, "there is no folder no/such/folder"),
        ({"overrides": ["MODEL.NO_KEY", "1"]}, "NO_KEY"),
    ],
)
def test_mistakes_are_found_before_the_work(options, says, tmp_path):
    with pytest.raises(InputError, match=says):
        export(tmp_path / "out", **options)


def test_the_output_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write into"):
        export(tmp_path / "file")


def test_an_untrained_detector_finds_something():
    cfg = small_config("retinanet", "MODEL.RETINANET.SCORE_THRESH_TEST", "0.05")
    with torch.no_grad():
        instances = table.lively_detector(cfg)([{"image": torch.zeros(3, 64, 96)}])[0]["instances"]
    assert len(instances) > 10 and instances.scores.std() > 0.01
