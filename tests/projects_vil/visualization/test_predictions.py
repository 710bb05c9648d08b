"""Drawings of predictions and training samples, and the summary of a run, from files of detectron2's evaluators."""

import json
import shutil
from itertools import chain, islice
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.structures import Boxes, Instances
from pycocotools.coco import COCO

from backbones.errors import ConfigError
from projects_vil.config import load_config
from projects_vil.data import IGNORED_LABEL, label_reader, load_dataset, register_datasets, write_shapes_dataset
from projects_vil.engine import Trainer
from projects_vil.visualization import (
    draw_evaluation,
    draw_instances,
    draw_results,
    draw_samples,
    predictions_file,
    summarize_run,
)
from projects_vil.visualization.drawing import GAP, HEADER, PANEL_WIDTH
from projects_vil.visualization.predictions import SMALLEST_SAMPLE, draw_sample
from tests.projects_vil.helpers import small_config
from tests.projects_vil.panoptic import panoptic_config

NAME, SEM_SEG = "visualize_test_shapes", "shapes_sem_seg_val"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("visualize") / "data"
    write_shapes_dataset(output, num_train=1, num_val=5, short_side=64)
    register_coco_instances(NAME, {}, str(output / "annotations/instances_val.json"), str(output / "val"))
    yield output
    DatasetCatalog.remove(NAME)
    MetadataCatalog.remove(NAME)


def perfect_results(dataset: Path, *, masks: bool = True, score: float = 0.9) -> list[dict]:
    """Return results in the form of COCOEvaluator that equal the ground truth."""
    coco = COCO(dataset / "annotations/instances_val.json")
    results = []
    for annotation in coco.anns.values():
        result = {key: annotation[key] for key in ("image_id", "category_id", "bbox")} | {"score": score}
        if masks:
            rle = coco.annToRLE(annotation)
            result["segmentation"] = {"size": list(map(int, rle["size"])), "counts": rle["counts"].decode()}
        results.append(result)
    return results


def perfect_segments() -> list[dict]:
    """Return segments in the form of SemSegEvaluator that equal the ground truth; ignored labels become class 2."""
    read, segments = label_reader(SEM_SEG), []
    for record in DatasetCatalog.get(SEM_SEG):
        labels = read(record["sem_seg_file_name"])
        labels[labels == IGNORED_LABEL] = 2
        for label in np.unique(labels):
            rle = mask_util.encode(np.asfortranarray(labels == label, dtype=np.uint8))
            mask = {"size": list(map(int, rle["size"])), "counts": rle["counts"].decode()}
            segments.append({"file_name": record["file_name"], "category_id": int(label) + 1, "segmentation": mask})
    return segments


def draw(folder: Path, results, name: str = NAME, **options) -> np.ndarray:
    (folder / "results.json").write_text(json.dumps(results))
    number = draw_results(name, folder / "results.json", folder / "sheet.png", **options)
    assert number == len(DatasetCatalog.get(name))
    return cv2.imread(str(folder / "sheet.png")).astype(int)


def halves(sheet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the left and the right image of a sheet with one row."""
    below = sheet[2 * HEADER :]
    return below[:, :PANEL_WIDTH], below[:, PANEL_WIDTH + GAP :][:, :PANEL_WIDTH]


@pytest.mark.parametrize("task", ["boxes", "masks", "labels"])
def test_predictions_are_drawn_next_to_ground_truth(dataset, shapes_sem_seg, tmp_path, task):
    name = SEM_SEG if task == "labels" else NAME
    results = perfect_segments() if task == "labels" else perfect_results(dataset, masks=task == "masks")
    sheet = draw(tmp_path, results, name, num_images=1)
    truth, drawn = halves(sheet)
    same_truth, bare = halves(draw(tmp_path, [], name, num_images=1))
    np.testing.assert_array_equal(truth, same_truth)
    assert np.any(drawn != bare, axis=2).mean() > 0.005
    assert np.abs(truth - drawn).mean() < np.abs(truth - bare).mean()
    # A small image is enlarged to the panel, and each image has a row.
    assert max(sheet.shape[0] - 2 * HEADER, PANEL_WIDTH) >= 480 and sheet.shape[1] == 2 * (PANEL_WIDTH + GAP)
    assert len(draw(tmp_path, results, name, num_images=32)) > 4 * 250


def test_low_scores_are_left_out(dataset, tmp_path):
    results = perfect_results(dataset, score=0.3)
    _, bare = halves(draw(tmp_path, [], num_images=1))
    for threshold, is_drawn in ((0.31, False), (0.3, True)):
        _, drawn = halves(draw(tmp_path, results, num_images=1, score_threshold=threshold))
        assert np.any(drawn != bare) == is_drawn


def test_empty_masks_leave_the_box(dataset, tmp_path):
    results = perfect_results(dataset)
    for result in results:
        height, width = result["segmentation"]["size"]
        result["segmentation"] = {"size": [height, width], "counts": [height * width]}
    without_masks = draw(tmp_path, perfect_results(dataset, masks=False), num_images=1)
    np.testing.assert_array_equal(draw(tmp_path, results, num_images=1), without_masks)


def test_colors_of_the_dataset(dataset, shapes_sem_seg, tmp_path, monkeypatch):
    results, segments = perfect_results(dataset), perfect_segments()
    things, stuff = MetadataCatalog.get(NAME), MetadataCatalog.get(SEM_SEG)
    before = draw(tmp_path, results), draw(tmp_path, segments, SEM_SEG)
    monkeypatch.setitem(vars(things), "thing_colors", [(255, 255, 255)] * 3)
    monkeypatch.setitem(vars(stuff), "stuff_colors", [(255, 255, 255)] * 4)
    after = draw(tmp_path, results), draw(tmp_path, segments, SEM_SEG)
    assert all(new.sum() > old.sum() for old, new in zip(before, after, strict=True))


def test_a_hole_in_a_mask_stays():
    image = np.full((60, 90, 3), 100, np.uint8)
    mask = np.zeros((60, 90), bool)
    mask[5:55, 10:80] = True
    mask[20:40, 30:60] = False
    metadata = MetadataCatalog.get("a_hole_in_a_mask").set(thing_classes=[""], thing_colors=[(0, 0, 255)])
    drawn = draw_instances(image, [{"bbox": [10, 5, 70, 50], "category_id": 0, "segmentation": mask}], metadata)
    assert (drawn[25:35, 35:55] == 100).all() and (drawn[:3] == 100).all()
    assert (drawn[45:50, 20:70, 2] > 130).all() and (drawn[45:50, 20:70, :2] < 90).all()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{not json",
        '{"AP": 1}',
        '[{"image_id": 2}]',
        '[{"image_id": 139, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}]',
        '[{"image_id": 2, "category_id": 18, "bbox": [1, 2, 3, 4], "score": 0.5}]',
        "masks of another size",
    ],
)
def test_damaged_predictions_and_those_of_another_dataset(dataset, tmp_path, content):
    if content == "masks of another size":
        results = perfect_results(dataset)
        results[0]["segmentation"]["size"].reverse()
        content = json.dumps(results)
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ConfigError, match=r"results\.json"):
        draw_results(NAME, tmp_path / "results.json", tmp_path / "sheet.png")
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.parametrize("change", [{"file_name": "other.jpg"}, {"category_id": 9}, {"segmentation": {"size": [3, 4]}}])
def test_damaged_segments_and_those_of_another_dataset(shapes_sem_seg, tmp_path, change):
    segments = perfect_segments()
    segments[0] |= change
    with pytest.raises(ConfigError, match=r"segments\.json"):
        (tmp_path / "segments.json").write_text(json.dumps(segments))
        draw_results(SEM_SEG, tmp_path / "segments.json", tmp_path / "sheet.png")


@pytest.mark.parametrize(
    "options, name",
    [({"num_images": 0}, "num_images"), ({"num_images": 1000}, "num_images"), ({"score_threshold": 1.5}, "1.5")],
)
def test_options_out_of_range(dataset, tmp_path, options, name):
    with pytest.raises(ConfigError, match=name):
        draw(tmp_path, [], **options)


def test_files_that_are_missing_or_cannot_be_written(dataset, tmp_path):
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigError, match=NAME):
        draw_results(NAME + "x", tmp_path / "results.json", tmp_path / "sheet.png")
    with pytest.raises(ConfigError, match=r"sheet\.png"):
        draw_results(NAME, tmp_path / "results.json", tmp_path / "results.json/sheet.png")
    name = "visualize_test_missing_image"
    register_coco_instances(name, {}, str(dataset / "annotations/instances_val.json"), str(dataset / "train"))
    try:
        with pytest.raises(ConfigError, match=r"000000000002\.jpg"):
            draw_results(name, tmp_path / "results.json", tmp_path / "sheet.png")
    finally:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def test_where_a_run_has_its_predictions(dataset, shapes_sem_seg, tmp_path):
    assert predictions_file(tmp_path, NAME) == tmp_path / "inference/coco_instances_results.json"
    assert predictions_file(tmp_path, SEM_SEG) == tmp_path / "inference/sem_seg_predictions.json"
    own = tmp_path / "inference" / SEM_SEG / "sem_seg_predictions.json"
    own.parent.mkdir(parents=True)
    own.write_text("[]")
    assert predictions_file(tmp_path, SEM_SEG) == own


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tasks, line",
    [
        (
            {"bbox": {"AP": 63.14, "AP50": 90.0}, "segm": {"AP": 57.96}},
            "box AP 63.1   mask AP 58.0   (val, 100 images)",
        ),
        ({"bbox": {"AP": 63.14}}, "box AP 63.1   (val, 100 images)"),
        ({"sem_seg": {"mIoU": 41.26, "pACC": 90.0}}, "mIoU 41.3   (val, 100 images)"),
    ],
)
def test_summary_of_a_run(tmp_path, tasks, line):
    (tmp_path / "evaluation.json").write_text(json.dumps({"val": tasks}))
    for name in ("model_0000049.pth", "model_final.pth"):
        (tmp_path / name).touch()
        lines = summarize_run(tmp_path, "val", num_images=100, drawing=tmp_path / "predictions.png")
        assert lines == [line, f"results in {tmp_path}: {name}, evaluation.json, predictions.png"]
    (tmp_path / "export").mkdir()
    lines = summarize_run(tmp_path, "val", num_images=100, drawing="elsewhere/sheet.png")
    assert lines[1].endswith("model_final.pth, evaluation.json, export/, elsewhere/sheet.png")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"other": {"bbox": {"AP": 1}}}', '{"val": {"bbox": null}}'])
def test_summary_without_results(tmp_path, content):
    if content is not None:
        (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match=r"evaluation\.json"):
        summarize_run(tmp_path, "val", num_images=1, drawing="predictions.png")


def test_drawings_of_an_evaluation(trained_run, shapes, tmp_path, caplog):
    """The images are the same each time; a drawing that fails is a warning."""
    shutil.copytree(trained_run / "inference", tmp_path / "inference")

    def draw_images(number: int, name: str) -> list[Path]:
        keys = ["OUTPUT_DIR", str(tmp_path), "TEST.DRAW_IMAGES", str(number)]
        return draw_evaluation(load_config(trained_run / "config.yaml", keys), name=name)

    assert draw_images(0, "none") == [] and not (tmp_path / "drawings").exists()
    first, second, more = (draw_images(number, name)[0] for number, name in ((2, "0010"), (2, "0020"), (4, "more")))
    assert first == tmp_path / "drawings/shapes_val_0010.jpg" and first.read_bytes() == second.read_bytes()
    assert len(cv2.imread(str(more))) > 1.5 * len(cv2.imread(str(first)))
    (tmp_path / "inference/coco_instances_results.json").write_text("[")
    assert draw_images(2, "damaged") == []
    assert "shapes_val" in caplog.text and "coco_instances_results.json" in caplog.text


# -- training samples ------------------------------------------------------------------------------


def read(path: Path) -> np.ndarray:
    return cv2.imread(str(path))[..., ::-1]


@pytest.mark.parametrize(
    "detector, keys", [("mask_rcnn", ["INPUT.AUGMENTATION", "strong"]), ("retinanet", ["INPUT.AUGMENTATION", "lsj"])]
)
def test_samples_are_the_first_images_of_a_run(shapes, tmp_path, detector, keys):
    keys = [*keys, "INPUT.LSJ.SIZE", "64", "SOLVER.IMS_PER_BATCH", "3", "SEED", "11", "DATALOADER.NUM_WORKERS", "1"]
    cfg = small_config(detector, *keys)
    paths = draw_samples(cfg, tmp_path / "drawn", number=4)
    loader = Trainer.build_train_loader(cfg)
    loader.start(seed=11, iteration=0)
    samples = list(islice(chain.from_iterable(loader), 4))
    loader.stop()
    for index, (path, sample) in enumerate(zip(paths, samples, strict=True)):
        assert path.name == f"{index:04d}_{Path(sample['file_name']).stem}.png"
        drawn = read(path)
        assert (drawn == draw_sample(cfg, sample)).all()
        assert max(drawn.shape[0] - 2 * HEADER - GAP, drawn.shape[1] - GAP) == pytest.approx(SMALLEST_SAMPLE, abs=2)
    assert sorted((tmp_path / "drawn").iterdir()) == paths
    others = draw_samples(cfg, tmp_path / "others", number=4, seed=12)
    assert [path.read_bytes() for path in others] != [path.read_bytes() for path in paths]


def test_labels_of_stuff_are_drawn_below_objects(panoptic_root, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(panoptic_root))
    cfg = panoptic_config("SOLVER.IMS_PER_BATCH", "1")
    register_datasets(cfg)
    loader = Trainer.build_train_loader(cfg)
    loader.start(seed=0, iteration=0)
    sample = next(iter(loader))[0]
    loader.stop()
    ignored = torch.full_like(sample["sem_seg"], 255)
    left_half = ignored.clone()
    left_half[:, : ignored.shape[1] // 2] = 1
    bare, tinted = (draw_sample(cfg, sample | {"sem_seg": labels}) for labels in (ignored, left_half))
    height = (len(bare) - HEADER) // 2
    objects, labels = (np.any(bare != tinted, axis=2)[HEADER + top :][:height, :-GAP] for top in (0, height))
    assert not objects.any()
    middle = labels.shape[1] // 2
    assert labels[HEADER:-GAP, : middle - 20].mean() > 0.9 and not labels[:, middle + 20 :].any()
    # A detector of things alone has no labels of stuff.
    cfg = panoptic_config("MODEL.META_ARCHITECTURE", "GeneralizedRCNN")
    assert (draw_sample(cfg, sample) == bare[: HEADER + height]).all()


@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_colours_and_boxes_of_a_sample(shapes, image_format):
    """A red image, in the order of channels that the model gets, with a box."""
    image = torch.zeros(3, 40, 64, dtype=torch.uint8)
    image[image_format.index("R")] = 200
    instances = Instances((40, 64), gt_boxes=Boxes(torch.tensor([[8.0, 10.0, 40.0, 30.0]])))
    instances.gt_classes = torch.tensor([0])
    cfg = small_config("retinanet", "INPUT.FORMAT", image_format)
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)  # reads the names of the classes
    drawn = draw_sample(cfg, {"file_name": "a/b.jpg", "image": image, "instances": instances})
    drawn = drawn[2 * HEADER : -GAP, :-GAP].astype(int)
    assert drawn.shape[:2] == (400, 640) and (abs(drawn[20, 600] - [200, 0, 0]) < 8).all()
    edges = abs(drawn - [200, 0, 0]).max(axis=2) > 30
    assert edges[200, 76:85].any() and edges[200, 396:405].any() and edges[296:305, 240].any()
    assert not edges[200, 100:380].any()


def test_samples_that_cannot_be_drawn(shapes, tmp_path):
    for options, name in (({"number": 0}, "number is 0"), ({"seed": -1}, "seed is -1")):
        with pytest.raises(ConfigError, match=name):
            draw_samples(small_config(), tmp_path / "drawn", **options)
    assert not (tmp_path / "drawn").exists()
    # Drawings of an earlier call are not mixed with those of another.
    (path,) = draw_samples(small_config(), tmp_path, number=1)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=path.name):
        draw_samples(small_config(), tmp_path, number=2, seed=5)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
