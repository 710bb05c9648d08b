"""The evaluation of Parquet files equals the evaluation of the detector that wrote them."""

import json
import math
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from detectron2.data import MetadataCatalog
from detectron2.evaluation.coco_evaluation import COCOEvaluator

from projects_vil.run import evaluate
from tests.projects_vil.evaluation.test_coco_matches import HEIGHT, WIDTH, drawn, feed
from tests.projects_vil.helpers import PATIENCE, message, vil

parquet = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")
IDS = {2: 30, 3: 20, 5: 10, 7: 40}  # category ids of the dataset -> category ids of the detector


def write(path: Path, rows: list[dict], names: list[str] | None = None) -> None:
    names = names or [f"class {number}" for number in IDS]
    categories = [{"id": number, "name": name} for number, name in zip(IDS.values(), names, strict=True)]
    lists = {"boxes": pa.list_(pa.list_(pa.float32(), 4)), "scores": pa.list_(pa.float32())}
    lists |= {"category_ids": pa.list_(pa.int32()), "masks": pa.list_(pa.binary()), "error": pa.string()}
    schema = pa.schema({"file_name": pa.string(), "height": pa.int32(), "width": pa.int32(), **lists})
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows, schema.with_metadata({"categories": json.dumps(categories)})), path)


def row(name: str, results: list[dict]) -> dict:
    boxes = np.array([one["bbox"] for one in results], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    columns = {"file_name": name, "height": HEIGHT, "width": WIDTH, "boxes": boxes.tolist(), "error": None}
    columns["scores"] = [one["score"] for one in results]
    columns["category_ids"] = [IDS[one["category_id"]] for one in results]
    return columns | {"masks": [one["segmentation"]["counts"].encode() for one in results]}


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A dataset in ``mine``, rows for most of its images, and the metrics that detectron2 computes."""
    monkeypatch.chdir(tmp_path)
    dataset, results = drawn()
    (tmp_path / "mine/sub").mkdir(parents=True)
    (tmp_path / "mine/instances.json").write_text(json.dumps(dataset))
    for image in dataset["images"]:
        cv2.imwrite(str(tmp_path / "mine" / image["file_name"]), np.zeros((HEIGHT, WIDTH, 3), np.uint8))
    rows = {}
    for image in dataset["images"][:-2]:
        own = [one for one in results if one["image_id"] == image["id"]]
        rows[image["id"]] = row(f"s3://lake/{image['file_name']}", sorted(own, key=lambda one: -one["score"]))
    name = str(tmp_path)
    facts = {"thing_dataset_id_to_contiguous_id": {2: 0, 3: 1, 5: 2, 7: 3}, "thing_classes": ["2", "3", "5", "7"]}
    MetadataCatalog.get(name).set(json_file="mine/instances.json", **facts)
    reference = COCOEvaluator(name, max_dets_per_image=100)
    reference.reset()
    feed(reference, sorted(results, key=lambda one: -one["score"]), list(rows))
    return list(rows.values()), reference.evaluate()


several = pytest.param("mine --predictions found --num-gpus 2", marks=pytest.mark.slow)
files = "mine --predictions found/part-000000.parquet found/part-000001.parquet"


@pytest.mark.parametrize("words", [files, "--predictions found mine", several])
def test_files_and_folders(case, words):
    """Files in any order, other class names in one file, rows of other images, and an error row."""
    rows, expected = case
    empty = next(one for one in rows if not one["scores"])
    empty |= {"error": "damaged", "height": None, "width": None, "masks": None}
    others = [row("elsewhere/unknown.jpg", []), row("other 1.jpg", [])]
    write(Path("found/part-000000.parquet"), [*rows[9:], *others])
    write(Path("found/part-000001.parquet"), rows[8::-1], names=["cat", "dog", "cow", "emu"])
    status, out, err = vil("eval", *words.split(), "--output", "out")
    assert status == 0, err
    (metrics,) = json.loads(Path("out/evaluation.json").read_text()).values()
    for task, values in expected.items():
        for metric in ("AP", "AP50", "AP75", "APs", "APm", "APl"):
            assert metrics[task][metric] == values[metric]
        assert metrics[task]["per_class"]["class 3"]["AP"] == values["AP-3"]
    assert Path("out/log.txt.rank1").exists() == ("--num-gpus" in words)
    log = out + "".join(path.read_text() for path in Path("out").glob("log.txt"))  # of new processes
    assert "24 images" in log and "2 without a prediction, 1 with an error; 2 rows" in log
    entries = json.loads(Path("out/inference/coco_instances_results.json").read_text())
    assert {one["category_id"] for one in entries} == {2, 3, 5}


def test_mistakes(case, monkeypatch):
    rows, _ = case
    write(Path("twice/a.parquet"), rows)
    write(Path("twice/b.parquet"), rows[:1])
    write(Path("unknown/a.parquet"), [row("unknown.jpg", [])])
    write(Path("classes/a.parquet"), rows, names=["class 3", "cat", "cow", "emu"])
    write(Path("size/a.parquet"), [rows[0] | {"height": HEIGHT + 1}])
    full = max(rows, key=lambda one: len(one["scores"]))
    write(Path("lengths/a.parquet"), [full | {"scores": []}])
    write(Path("category/a.parquet"), [full | {"category_ids": [99] * len(full["scores"])}])
    write(Path("nulls/a.parquet"), [full | {"masks": [None] * len(full["scores"])}])
    write(Path("rle/a.parquet"), [full | {"masks": [b"o" * 99] * len(full["scores"])}])
    Path("damaged").write_text("PAR1")
    parquet.write_table(parquet.read_table("size/a.parquet").drop_columns("boxes"), "no_boxes")
    expected = {"twice": "b.parquet", "classes": "cat", "size": "241", "/dev/null": "a device"}
    expected |= dict.fromkeys(("damaged", "nulls", "lengths", "category", "no_boxes", "rle"), "is damaged")
    for folder, word in expected.items():
        assert word in message(evaluate, None, "mine", predictions=[folder], output="out")
    assert "unknown" not in message(evaluate, None, "mine", predictions=["unknown"], output="out")
    assert not Path("out/evaluation.json").exists()
    assert "annotations" in message(evaluate, None, predictions=["twice"], output="out")  # COCO is missing
    for words in ([], ["--predictions", "mine"], ["mine", "mine", "--predictions", "twice"]):
        assert vil("eval", *words)[0] == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pyarrow" in message(evaluate, None, "mine", predictions=["twice"], output="out")


@pytest.mark.parametrize("key, value", [("boxes", [1.0, math.nan, 9.0, 9.0]), ("scores", math.inf), ("scores", None)])
def test_non_finite_detections(case, key, value):
    rows, _ = case
    changed = next(one for one in rows if one["scores"])
    changed[key][-1] = value
    write(Path("found/a.parquet"), rows)
    text = message(evaluate, None, "mine", predictions=["found"], output="out")
    assert "found/a.parquet" in text and changed["file_name"] in text and "finite" in text
    assert not Path("out/evaluation.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_ends_the_other_at_once(case, rank, monkeypatch):
    """The processes share the rows in turns of 64. After the grace period, the other process would be killed."""
    monkeypatch.setattr("projects_vil.engine.launch.GRACE_PERIOD", 2 * PATIENCE)
    rows, _ = case
    others = [row("elsewhere/unknown.jpg", []) for _ in range(64 * 500)]
    next(one for one in rows if one["scores"])["scores"][0] = math.inf
    write(Path("found/a.parquet"), [*others[: 64 * rank], *rows, *others])
    start = time.monotonic()
    text = message(evaluate, None, "mine", predictions=["found"], output="out", num_gpus=2)
    assert "finite" in text and "\n" not in text and time.monotonic() - start < PATIENCE


@pytest.mark.parametrize("number", [None, 1])
def test_masks_of_a_dataset_without_masks(case, number, capsys):
    rows, expected = case
    dataset = json.loads(Path("mine/instances.json").read_text())
    for one in dataset["annotations"][:number]:
        one["segmentation"] = []
    Path("mine/instances.json").write_text(json.dumps(dataset))
    write(Path("found/a.parquet"), rows)
    (tasks,) = evaluate(None, "mine", predictions=["found"], output="out", **{"DATASETS.CHECK": "off"}).values()
    assert tasks.keys() == {"bbox"} and tasks["bbox"]["AP"] == expected["bbox"]["AP"]
    assert ("boxes only: 1 of" in capsys.readouterr().out) == (number == 1)
