"""The HTML report of a run: its sections, and what it omits."""

import html.parser
import json
import shutil
from collections import Counter

import cv2
import numpy as np
import pytest

from projects_vil.report import write_report
from tests.projects_vil.helpers import message, run_tool


class Page(html.parser.HTMLParser):
    """The URLs, ids and text of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.urls, self.ids, self.tags, self.text = [], [], [], ""
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.urls += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def report(trained_run, datasets_root, made_once):
    """The report of a run."""

    def write(folder):
        words = [trained_run, "--output", folder / "r.html", "--num-images", 3]
        result = run_tool("report.py", *words, datasets_root=datasets_root)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"wrote {folder / 'r.html'}")

    return made_once("report", write) / "r.html"


def content_types(page: Page) -> Counter:
    return Counter(url[5:].partition(";")[0] for url in page.urls if url.startswith("data:image"))


def test_a_report_is_self_contained_and_has_all_sections(report, trained_run):
    content = report.read_text()
    page = Page(content)
    assert all(url.startswith(("#", "data:")) for url in page.urls)
    assert "url(http" not in content and "@import" not in content and "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    anchors = {url[1:] for url in page.urls if url.startswith("#")}
    assert anchors <= set(page.ids)
    training, evaluation = ("Losses", "Learning rate", "Gradient norm"), ("Precision and recall, boxes", "By class")
    for text in (*training, *evaluation, "Confusion matrix", "Matches", "Configuration", "Versions", "Warnings"):
        assert text in page.text, text
    ap = json.loads((trained_run / "evaluation.json").read_text())["shapes_val"]["bbox"]["AP"]
    assert f"{ap:.1f}" in page.text and "SOLVER.MAX_ITER" in page.text and "PyTorch" in page.text
    assert content_types(page) == {"image/jpeg": 3, "image/svg+xml": 7} and page.tags.count("details") == 1
    assert "no ground truth of this size or class" in page.text
    assert "Omitted" not in page.text


def test_missing_files_are_omitted_and_listed(trained_run, datasets_root, tmp_path):
    assert "Use the output directory of a run" in message(write_report, tmp_path) and not list(tmp_path.iterdir())
    shutil.copy(trained_run / "config.yaml", tmp_path)
    (tmp_path / "metrics.json").write_text('{"iteration": 3, "total_loss": NaN, "lr": 0.1}\n{"iterat')
    warning = "[11/22 03:15:25] d2.x WARNING: <b>odd</b> & old\nsecond line\n"
    (tmp_path / "log.txt").write_text(f"{warning}[11/22 03:15:26] d2.x INFO: fine\n{warning}")
    result = run_tool("report.py", tmp_path, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    content = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;odd&lt;/b&gt; &amp; old\nsecond line" in content and "(2 times)" in content
    assert "fine" not in Page(content).text
    for words in ("evaluation.json", "inference/coco_instances_results.json", "1 of 2 lines of metrics.json"):
        assert words in Page(content).text and words in result.stderr, words
    (tmp_path / "evaluation.json").write_text('{"shapes_val": {"bbox": {"AP": "high"}}}')
    assert "evaluation.json' is damaged" in run_tool("report.py", tmp_path, datasets_root=datasets_root).stderr


@pytest.mark.parametrize("missing", [(), ("area", "iscrowd")])
def test_custom_datasets(synthetic_results, tmp_path, trained_run, missing):
    """Names are escaped. Annotations without area and iscrowd are fixed as in training."""
    dataset, results = synthetic_results
    # Only the crowd has iscrowd.
    for item in dataset["annotations"]:
        for key in missing if not item["iscrowd"] else ():
            del item[key]
    dataset["categories"].append({"id": 9, "name": "absent"})
    annotations = tmp_path / "annotations.json"
    annotations.write_text(json.dumps(dataset))
    for image in dataset["images"]:
        cv2.imwrite(str(tmp_path / image["file_name"]), np.full((80, 100, 3), 90, np.uint8))
    run = tmp_path / "run"
    (run / "inference").mkdir(parents=True)
    shutil.copy(results, run / "inference/coco_instances_results.json")
    shutil.copy(trained_run / "config.yaml", run)
    entry = f"[['odd_names', '{annotations}', '{tmp_path}']]"
    result = run_tool("report.py", run, "--opts", "DATASETS.COCO", entry, "DATASETS.TEST", "('odd_names',)")
    assert result.returncode == 0, result.stderr
    content = (run / "report.html").read_text()
    assert "<cat>" not in content and "&lt;cat&gt; &amp; co" in content
    page = Page(content)
    assert "3 objects without crowds: 3 small, 0 medium" in page.text and "number of objects" in page.text
    by_class = page.text.partition("By class")[2].partition("Confusion matrix")[0]
    assert "classes without objects: absent." in page.text and "dog" in by_class and "absent" not in by_class
    assert content_types(page)["image/jpeg"] == 2 and "odd_names" not in page.text.rpartition("Omitted")[2]
    for wrong in (1, 0):
        assert f"true positives: 1, false positives: {wrong}, missed objects: {wrong}" in page.text
