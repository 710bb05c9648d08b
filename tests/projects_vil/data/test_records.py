"""Test the records of datasets, and their error messages."""

import multiprocessing
import pickle
import resource
import shutil
import sys
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils import comm

from backbones import ConfigError
from projects_vil.data import build_test_loader, build_train_loader, load_dataset, read_datasets, register_datasets
from projects_vil.data.records import SHARED, SharedRecords, read_and_share
from projects_vil.evaluation import build_evaluator, validation_loss
from tests.projects_vil.data.custom_dataset import NAME, config, edit, entry, first_image, load
from tests.projects_vil.engine.gloo import in_processes
from tests.projects_vil.helpers import message

# -- files -----------------------------------------------------------------------------------------


def test_missing_images(copy):
    images = sorted((copy / "images").iterdir())
    images[2].unlink(), images[5].unlink()
    for check in ("error", "off"):
        assert images[2].name in message(load, copy, "DATASETS.CHECK", check)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"images": [}', b"\xff\xfe\x00\x12", b"[]", b'{"images": 3, "annotations": [], "categories": []}'),
        *(b'{"images": [], "annotations": [], "categories": []}', b'{"images": ["a.jpg"], "categories": ["a"]}'),
    ],
)
def test_annotations_that_are_not_coco(copy, content):
    (copy / "annotations.json").write_bytes(content)
    assert str(copy / "annotations.json") in message(load, copy)


def test_images_without_objects_are_evaluated_and_by_default_not_trained_on(copy):
    first = first_image(copy)
    edit(copy, lambda c: c.update(annotations=[a for a in c["annotations"] if a["image_id"] != c["images"][0]["id"]]))
    assert str(first) not in {record["file_name"] for record in load(copy)}
    assert len(load(copy)) == 7 and len(load(copy, "DATALOADER.FILTER_EMPTY_ANNOTATIONS", "False")) == 8
    edit(copy, lambda content: content.update(annotations=[]))
    assert str(copy / "annotations.json") in message(load, copy)
    assert len(load(copy, train=False)) == 8


def test_datasets_of_other_classes_are_not_mixed(copy, shapes):
    edit(copy, lambda content: content["categories"][0].update(name="disc"))
    register_datasets(config(entry(copy)))
    text = message(load_dataset, config(entry(copy)), ["shapes_val", NAME], train=True)
    assert "shapes_val" in text and NAME in text


def test_training_datasets_with_classes_in_another_order(copy, shapes):
    """All datasets get the class order of the first dataset, also for the validation loss."""

    def reverse(content: dict) -> None:
        for one in content["categories"]:
            one["id"] = 10 - one["id"]
        for one in content["annotations"]:
            one["category_id"] = 10 - one["category_id"]

    edit(copy, reverse)
    cfg = config(entry(copy), overrides=["DATASETS.TRAIN", f"('shapes_val', '{NAME}')", "TEST.VALIDATION_LOSS", "True"])
    register_datasets(cfg)
    first, second = np.split(np.array(load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)), 2)
    for one, other in zip(first, second, strict=True):
        classes = [[entry["category_id"] for entry in record["annotations"]] for record in (one, other)]
        assert one["image_id"] == other["image_id"] and classes[0] == classes[1]
    model = build_model(cfg)
    assert validation_loss(cfg, model, NAME) == validation_loss(cfg, model, "shapes_val")


def test_box_dataset_for_a_mask_detector(copy):
    edit(copy, lambda content: [a.pop("segmentation") for a in content["annotations"]])
    for train in (True, False):
        text = message(load, copy, detector="mask_rcnn", train=train)
        assert str(copy / "annotations.json") in text and text.endswith("Set MODEL.MASK_ON False.")
    edit(copy, lambda content: content.update(annotations=[]))
    assert len(load(copy, detector="mask_rcnn", train=False)) == 8


def test_too_many_objects_for_the_memory(copy, monkeypatch, tmp_path):
    (tmp_path / "limit").write_text("90000\n")
    for name, value in {"os.sysconf": lambda name: 300, "_MEMORY_LIMITS": [tmp_path / "limit"]}.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"projects_vil.data.records.{name}", value)
            text = message(load, copy)
            assert f"'{copy}/images/" in text and " objects. " in text and "INPUT.MAX_SIZE_TRAIN" in text
            assert len(load(copy, train=False)) == 8


# -- processes -------------------------------------------------------------------------------------


def test_records_stay_valid_if_a_new_process_receives_them():
    items = [{"box": [0.5] * 100_000}, "text"]
    records = SharedRecords(items)
    # The first access makes views of the memory that the next line moves.
    assert records[0] == items[0]
    copy = pickle.loads(ForkingPickler.dumps(records))
    assert [*records] == [*copy] == items and records[-1] == "text"
    with pytest.raises(IndexError):
        records[-3]


def files_opened() -> list[str]:
    """Return a list that collects the annotation files and images that this process opens."""
    opened = []

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).endswith((".json", ".jpg")):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)
    return opened


def _read_in_rank(rank: int, folder, init_file, results, per_machine: int) -> None:
    """Read the datasets of a run, load a batch, and read all data of an evaluation."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    comm.create_local_process_group(per_machine)
    overrides = ["SOLVER.IMS_PER_BATCH", "4", "DATASETS.CHECK", "warn"]
    # Simulates two machines with different files.
    file = "other.json" if per_machine == 1 and rank == 1 else "annotations.json"
    cfg = config([NAME, str(folder / file), str(folder / "images")], overrides=overrides)
    register_datasets(cfg)
    opened = files_opened()
    try:
        number = read_datasets(cfg)
    except ConfigError as error:
        results.put((rank, str(error), [], []))
        return
    checked = len(opened)
    for _ in range(2):
        tested = [batch[0]["file_name"] for batch in build_test_loader(cfg, NAME)]
        truth = build_evaluator(cfg, NAME, str(folder / "out"))._evaluators[0].truth
    loader = build_train_loader(cfg)
    loader.start(seed=3, iteration=0)
    names = [record["file_name"] for batch in islice(loader, 1) for record in batch]
    again = [name for name in opened[checked:] if name.endswith(".json")]
    results.put((rank, number, names, (opened[:checked], again, len(tested), len(truth))))


@pytest.mark.parametrize("case", ["sound", "refused", "machines with different files"])
def test_the_first_process_of_a_machine_reads_and_checks_once_for_all(copy, tmp_path, case):
    shutil.copy(copy / "annotations.json", copy / "other.json")
    if case != "refused":
        first_image(copy).write_bytes(b"")
    if case == "machines with different files":
        edit(copy, lambda content: content["images"].pop())
    if case == "refused":
        edit(copy, lambda content: [one.update(bbox=[0.1, 0.1, 0.2, 0.2]) for one in content["annotations"]])
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    arguments = (copy, tmp_path / "init", results, 2 if case != "machines with different files" else 1)
    processes = [context.Process(target=_read_in_rank, args=(rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    (_, *first), (_, *second) = sorted(results.get() for _ in processes)
    if case != "sound":
        named = str(copy / "annotations.json") if case == "refused" else "DATASETS"
        assert first == second and named in first[0]
        return
    assert first[0] == second[0] == 7 and not set(first[1]) & set(second[1])
    assert set(first[2][0]) == {*(path.name for path in (copy / "images").iterdir()), "annotations.json"}
    assert second[2][0] == []
    # The loaders and evaluators of both processes skip the unreadable image, and no file is read again.
    assert first[2][1:] == ([], 4, 7) and second[2][1:] == ([], 3, 7)


def test_an_error_in_the_first_process_stops_all_processes(tmp_path):
    in_processes(2, _read_with_errors, tmp_path / "absent", store=tmp_path / "store")


def _read_with_errors(absent: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # simulates a full disk
    assert "absent" in message(read_and_share, absent.read_text)
    with pytest.raises(ConfigError, match="Cannot write .*: File too large"):
        read_and_share(lambda: SHARED.update({("key",): SharedRecords([{"box": 100 * [0.5]}] * 100)}))
