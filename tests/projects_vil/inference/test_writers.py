"""Results in order, and nothing half written."""

import json

import pytest

from projects_vil.checkpoint import Categories
from projects_vil.inference import Detector
from projects_vil.inference.predict import run
from projects_vil.inference.sources import ImageFile, Images
from projects_vil.inference.writers import JsonList
from tests.projects_vil.inference.helpers import HalfFinder, picture, read, run_on, save


def test_a_json_list_is_in_order_of_its_index(tmp_path):
    with (tmp_path / "list.json").open("w") as file:
        items = JsonList(file)
        for index in (2, 0, 3, 1):
            items.put(index, [{"index": index}] * (index % 3))
        items.close()
    assert json.loads((tmp_path / "list.json").read_text()) == [{"index": 1}, {"index": 2}, {"index": 2}]


def test_an_interruption_leaves_the_results_before_it(tmp_path):
    for number in range(6):
        save(tmp_path / f"in/{number}.png", picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out")
    before = read(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_on(tmp_path / "in", tmp_path / "out", runner=HalfFinder(stop_after=2), batch_size=1)
    assert read(tmp_path / "out") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["images.json", "results.json"]


def test_both_files_are_of_one_run(tmp_path):
    save(tmp_path / "a.png", picture(40, 60))
    run_on(tmp_path / "a.png", tmp_path / "out")
    before = read(tmp_path / "out")
    save(tmp_path / "b.png", picture(40, 60))
    images = [ImageFile(tmp_path / "b.png", "b.png", 9)]
    # What images.json cannot be made of, when results.json is complete.
    with pytest.raises(ValueError, match="zip"):
        run(Images(images), Detector(HalfFinder(), categories=Categories((3, 7), ("left",))), tmp_path / "out", None)
    assert read(tmp_path / "out") == before and len(list((tmp_path / "out").iterdir())) == 2
