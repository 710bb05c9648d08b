"""The table of published results and the commands that reproduce them."""

from projects_vil.checkpoint.zoo import read_zoo
from research.reproduce.__main__ import detectors
from tests.projects_vil.helpers import run_tool


def test_rows_agree_with_the_model_zoo(tmp_path):
    """A config has its figures in a comment. The zoo has the figures of the official README."""
    rows = {row["name"]: row for row in detectors(tmp_path)}
    entries = [entry for entry in read_zoo().values() if entry.config in rows]
    for entry in entries:
        figures = " / ".join(str(entry.figures[key]) for key in ("box_ap", "mask_ap") if key in entry.figures)
        assert figures in rows[entry.config]["published"].split(", ")
    assert len(entries) == 41 and len(rows) == 57
    assert "MODEL.WEIGHTS litv2_b_in1k " in rows["retinanet/litv2_b_ws4_1x"]["command"]
    assert "MODEL.WEIGHTS vil_base_deep_rpb.pth" in rows["mask_rcnn/vil_base_deep_rpb_3x_ms"]["command"]


def test_results_of_runs(tmp_path):
    folder = tmp_path / "mask_rcnn/lit_s_1x"
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text('{"coco_2017_val": {"bbox": {"AP": 42.87}, "segm": {"AP": 39.51}}}')
    _, out, _ = run_tool("../research/reproduce/__main__.py", "--runs", tmp_path, "--select", "lit_s")
    assert "| mask_rcnn/lit_s_1x | 42.9 / 39.6 | LIT Table 7 | 42.9 / 39.5 |" in " ".join(out.split())
    assert f"configs/mask_rcnn/lit_s_1x.yaml --num-gpus 8 MODEL.WEIGHTS lit_s_in1k OUTPUT_DIR {folder}" in out
