"""The file of a run's results."""

import json

from projects_vil.evaluation import write_results
from tests.projects_vil.helpers import small_config


def test_results_of_two_datasets(tmp_path):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "('a', 'b')")
    write_results(cfg, {"a": {"bbox": {"AP": 1.5}}, "b": {"bbox": {"AP": float("nan"), "AP50": 2}}})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content == {"a": {"bbox": {"AP": 1.5}}, "b": {"bbox": {"AP": None, "AP50": 2}}}
