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
EVALUATION = [{"dataset": "d", "task": task, "AP": 31.2, "AP_exported": 31.1, "ok": True} for task in ("bbox", "segm")]


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
        "memory": {"eager": 301_000_000, "exported": 199_600_000},
        "evaluation": None,
        "bytes": 64_320_000,
        "seconds": 1.0,
    } | changes


def failed(**changes) -> dict:
    measured = ("images", "latency", "memory", "evaluation", "bytes")
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
    assert "warning: " not in err and "[1/1] retinanet vil torchscript fp32: box " in err
    assert all(5e6 < peak < 1e9 for peak in found["memory"].values()) and found["evaluation"] is None


@pytest.mark.slow
def test_the_tool_prints_a_table_and_fails_where_a_cell_fails(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    # Nothing can be written where a folder lies.
    (output / "retinanet_vil/model.ts").mkdir(parents=True)
    options = ["--formats", "torchscript", "--families", "vil", "ls", "--detectors", "retinanet"]
    args = [
        *options,
        "--image-size",
        "72",
        "100",
        "--output",
        output,
        "--json",
        tmp_path / "table.json",
        "--opts",
        *OVERRIDES,
    ]
    monkeypatch.setattr(sys, "argv", list(map(str, ["export_table.py", *args])))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tools/export_table.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert "warning: retinanet_ls has random weights" in err and "[2/2] retinanet ls torchscript fp32: box " in err
    header, _, failing, equal, *_ = out.splitlines()
    assert header.startswith("| detector | backbone | weights | runtime | precision | AP (eager) | ms (eager) | ")
    assert failing.startswith("| retinanet | vil_tiny_1_1_3_1_rpb | random | torchscript | fp32 | - |")
    assert "| FAILED: InputError: cannot write " in failing
    assert equal.startswith("| retinanet | ls_tiny | random | torchscript | fp32 | - | ") and "| box " in equal
    assert "one image of 72 x 100 by turns" in out
    assert "Traceback" in (output / "retinanet_vil/torchscript_fp32.error.txt").read_text()
    cells = json.loads((tmp_path / "table.json").read_text())
    assert [found["ok"] for found in cells] == [False, True]


@pytest.mark.slow
def test_precision_is_of_the_file_that_is_timed(shapes, tmp_path):
    run = tmp_path / "runs/retinanet_vil"
    run.mkdir(parents=True)
    cfg = small_config()
    (run / "config.yaml").write_text(cfg.dump())
    torch.save({"model": table.lively_detector(cfg).state_dict()}, run / "model_final.pth")
    (found,) = export(tmp_path / "out", runs=tmp_path / "runs", evaluate=True, image_size=(70, 90))
    (row,) = found["evaluation"]
    assert row["task"] == "bbox" and row["AP"] == row["AP_exported"] and row["ok"] and found["ok"]
    assert (found["latency"]["height"], found["latency"]["width"]) == (70, 90)


def test_what_a_format_does_not_have_is_left_out(monkeypatch, tmp_path, capsys):
    """Without its export being tried."""
    pytest.importorskip("onnxruntime")
    (found,) = export(tmp_path, formats=["onnx"], precisions=["bf16"])
    assert found["left_out"].startswith("--precision bf16: ONNX has no bfloat16 convolutions")
    assert {"ok", "error", "latency"}.isdisjoint(found)
    assert "[1/1] retinanet vil onnx bf16: left out: --precision bf16: ONNX has no" in capsys.readouterr().err
    lines = table.describe_table([found, cell()]).splitlines()
    assert len([line for line in lines if line.startswith("| retinanet")]) == 1
    assert f"Left out: onnx in bf16: {found['left_out']}." in lines


def test_a_cell_as_text():
    rest = "53 ms (eager 45), 64.3 MB, at its peak 200 (301) MB (1 s)"
    assert table.describe_cell(cell()) == f"box 2.0e-05 px, score 3.0e-07; {rest}"
    masks = [ROW | {"masks": 2e-6}, ROW | {"masks": 1e-6}]
    assert table.describe_cell(cell(images=masks)) == f"box 1.5e-05 px, score 3.0e-07, mask 2.0e-06; {rest}"
    different = cell(ok=False, images=[ROW | {"unmatched": 2}, ROW | {"unmatched": 1, "changed": 4}])
    assert table.describe_cell(different).startswith(
        "NOT EQUAL: box 1.5e-05 px, score 3.0e-07, 3 of 14 unmatched, 4 of 14 changed; "
    )
    assert table.describe_cell(failed(error="ValueError: no")) == "FAILED: ValueError: no (1 s)"


def test_a_table_has_a_row_for_each_detector_runtime_and_precision():
    cells = [cell(), failed(format="torchscript", error="OSError: a|b")]
    cells += [cell(family="ls", backbone="ls_tiny", precision="fp16", trained=False, evaluation=EVALUATION)]
    cells += [cell(memory={"eager": None, "exported": None})]
    lines = table.describe_table(cells).splitlines()
    measured = "53 (45) | 1.17 | 64.3 | 200 (301) | box 2.0e-05 px, score 3.0e-07 |"
    assert lines[1] == "|---" * 11 + "|" and lines[0].count("|") == lines[2].count("|") == 12
    assert lines[2:6] == [
        f"| retinanet | lit_ti | trained | onnx | fp32 | - | {measured}",
        "| retinanet | lit_ti | trained | torchscript | fp32 | - | - | - | - | - | FAILED: OSError: a\\|b |",
        f"| retinanet | ls_tiny | random | onnx | fp16 | bbox 31.1 (31.2); segm 31.1 (31.2) | {measured}",
        f"| retinanet | lit_ti | trained | onnx | fp32 | - | {measured.replace('200 (301)', '? (?)')}",
    ]
    assert "64 x 96" in lines[-1] and "3 of 3 cells have no detection" in lines[-1]


def test_formats_depend_on_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    available = table.available_formats()
    assert "aot_inductor" not in available and {"torchscript", "onnx", "torch_export"} <= set(available)
    assert ("openvino" in available) == (importlib.util.find_spec("openvino") is not None)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        table.export_table("unused", formats=["aot_inductor"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"families": ["vill"]}, "unknown backbone family 'vill'"),
        ({"detectors": ["mask"]}, "unknown detector 'mask'"),
        ({"formats": ["onxx"]}, "unknown format 'onxx'"),
        ({"precisions": ["fp8"]}, "unknown precision 'fp8'"),
        ({"image_size": (800, 31)}, "--image-size 800 31: models take sides of 32 pixels and more"),
        ({"evaluate": True}, "--evaluate needs trained detectors: --runs DIR"),
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
