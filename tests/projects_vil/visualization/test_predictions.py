"""Drawings of predictions and training samples, and the summary of a run."""

import json
import shutil
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

from backbones.errors import GENERATOR
from projects_vil.config import load_config
from projects_vil.data import IGNORED_LABEL, label_reader, load_dataset, register_datasets
from projects_vil.engine import Trainer
from projects_vil.visualization.drawing import FONT_FILE, GAP, HEADER, PANEL_WIDTH, draw_instances, sheet, write_image
from projects_vil.visualization.predictions import draw_evaluation, draw_results, draw_sample, draw_samples
from tests.projects_vil.helpers import message, small_config
from tests.projects_vil.panoptic import panoptic_config
from tests.selection import slow_except
from vil import cli

NAME, SEM_SEG = "shapes_val", "shapes_sem_seg_val"


def encode(mask: np.ndarray) -> dict:
    rle = mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": list(map(int, rle["size"])), "counts": rle["counts"].decode()}


def perfect_results(shapes: Path, *, masks: bool = True) -> list[dict]:
    """Return the ground truth in the format of COCOEvaluator."""
    coco = COCO(shapes / "annotations/instances_val.json")
    return [
        {key: item[key] for key in ("image_id", "category_id", "bbox")}
        | {"score": 0.3}
        | ({"segmentation": encode(coco.annToMask(item))} if masks else {})
        for item in coco.anns.values()
    ]


def perfect_segments() -> list[dict]:
    """Return the ground truth in the format of SemSegEvaluator. Ignored labels become class 2."""
    read, segments = label_reader(SEM_SEG), []
    for record in DatasetCatalog.get(SEM_SEG):
        labels = read(record["sem_seg_file_name"])
        labels[labels == IGNORED_LABEL] = 2
        for label in np.unique(labels):
            name = {"file_name": record["file_name"], "category_id": int(label) + 1}
            segments.append(name | {"segmentation": encode(labels == label)})
    return segments


def draw(folder: Path, results, name: str = NAME, **options) -> np.ndarray:
    (folder / "results.json").write_text(results if isinstance(results, str) else json.dumps(results))
    options = {"num_images": 1, "score_threshold": 0.3} | options
    draw_results(name, DatasetCatalog.get(name), folder / "results.json", folder / "sheet.png", **options)
    return cv2.imread(str(folder / "sheet.png")).astype(int)


def halves(sheet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the left and right images of a drawing with one row."""
    below = sheet[2 * HEADER :]
    return below[:, :PANEL_WIDTH], below[:, PANEL_WIDTH + GAP :][:, :PANEL_WIDTH]


@pytest.mark.parametrize("task", slow_except(["boxes", "masks", "labels"], ["masks"]))
def test_predictions_are_drawn_next_to_ground_truth(request, tmp_path, task):
    name = SEM_SEG if task == "labels" else NAME
    dataset = request.getfixturevalue(name.removesuffix("_val"))
    results = perfect_segments() if task == "labels" else perfect_results(dataset, masks=task == "masks")
    sheet = draw(tmp_path, results, name)
    truth, drawn = halves(sheet)
    same_truth, bare = halves(draw(tmp_path, [], name))
    np.testing.assert_array_equal(truth, same_truth)
    assert np.any(drawn != bare, axis=2).mean() > 0.005
    assert np.abs(truth - drawn).mean() < np.abs(truth - bare).mean()
    # A small image is enlarged, and each image has a row.
    assert max(sheet.shape[0] - 2 * HEADER, PANEL_WIDTH) >= 480 and sheet.shape[1] == 2 * (PANEL_WIDTH + GAP)
    assert len(draw(tmp_path, results, name, num_images=32)) > 4 * 250


def test_annotations_of_a_dataset(tmp_path, capsys):
    """Images with objects are drawn, with the colors of other drawings. Annotations with errors come first."""
    image = np.full((PANEL_WIDTH, PANEL_WIDTH, 3), 90, np.uint8)
    for name in ("a.png", "b.png", "c.png"):
        write_image(tmp_path / "data" / name, image)
    boxes = [{"id": 1, "image_id": 2, "category_id": 7, "bbox": [60, 80, 200, 120], "area": 24000, "iscrowd": 0}]
    wrong = [boxes[0] | {"id": 2, "image_id": 3, "category_id": 5}, boxes[0] | {"id": 3, "image_id": 3, "bbox": [1, 2]}]
    images = [{"id": i, "file_name": f"{'abc'[i - 1]}.png", "height": 480, "width": 480} for i in (1, 2, 3)]
    content = {"images": images, "annotations": boxes + wrong, "categories": [{"id": 7, "name": "cat"}]}
    (tmp_path / "data/train.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["vil", "check", str(tmp_path / "data"), "--draw", str(tmp_path / "drawn")])
        cli.main()
    drawn = np.array(Image.open(tmp_path / "drawn/train.png"))[2 * HEADER :]
    for left, finding in ((0, "unknown_category_id"), (PANEL_WIDTH + GAP, "")):
        panel, objects = drawn[:480, left : left + 480], [boxes[0] | {"category_id": 0, "finding": finding}]
        np.testing.assert_array_equal(panel, draw_instances(image, objects, Metadata(thing_classes=["cat"])))
    assert "left out: 1 without" in capsys.readouterr().out


def test_letters_of_installed_fonts(monkeypatch, caplog):
    """An installed font draws letters that DejaVu Sans lacks. A warning names a letter that no font has."""
    fonts = ["missing.ttf", FONT_FILE.replace("DejaVuSans", "STIXGeneral")]
    monkeypatch.setattr("projects_vil.visualization.drawing._installed_fonts", lambda: fonts)
    monkeypatch.setattr("detectron2.utils.logger._LOG_COUNTER", Counter())
    image, box = np.zeros((60, 90, 3), np.uint8), {"bbox": [10, 30, 70, 20], "category_id": 0}
    found, square = (draw_instances(image, [box], Metadata(thing_classes=[f"a {c}"])) for c in "\u231a\ua8e8")
    assert (found != square).any() and "'\ua8e8'" in caplog.text and "\u231a" not in caplog.text


def test_holes_of_masks_are_kept():
    image = np.full((60, 90, 3), 100, np.uint8)
    mask = np.zeros((60, 90), bool)
    mask[5:55, 10:80] = True
    mask[20:40, 30:60] = False
    metadata = Metadata(thing_classes=["a"], thing_colors=[(0, 0, 255)])
    drawn = draw_instances(image, [{"bbox": [10, 5, 70, 50], "category_id": 0, "segmentation": mask}], metadata)
    assert (drawn[25:35, 35:55] == 100).all() and (drawn[:3, 40:] == 100).all()
    assert (drawn[45:50, 20:70, 2] > 130).all() and (drawn[45:50, 20:70, :2] < 90).all()
    # Boxes of one class differ in their shade.
    boxes = [{"bbox": [10, 5, 70, 50], "category_id": 0}, {"bbox": [20, 15, 50, 30], "category_id": 0}]
    colors = draw_instances(image, boxes, metadata)[(55, 45), 40]
    assert colors.argmax(axis=1).tolist() == [2, 2] and (colors[0] != colors[1]).any()


@pytest.mark.parametrize("name", [NAME, SEM_SEG])
def test_damaged_predictions_and_predictions_of_another_dataset(request, tmp_path, name):
    dataset = request.getfixturevalue(name.removesuffix("_val"))
    (first, *_) = perfect_results(dataset) if name == NAME else perfect_segments()
    other = {"image_id": 139_000} if name == NAME else {"file_name": "other.jpg"}
    size = {"segmentation": encode(np.ones((3, 4)))}
    results = ["{not json", '{"AP": 1}', '[{"image_id": 2}]', *([first | change] for change in (other, size))]
    for content in [*results, [first | {"category_id": 18}]]:
        assert "results.json" in message(draw, tmp_path, content, name)
    assert not (tmp_path / "sheet.png").exists()


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drawing.png", "drawing.jpg"])
def test_a_drawing_may_be_replaced_by_a_later_one(tmp_path, name):
    """The file has a comment, and the pixels of the image."""
    image = np.full((37, 53, 3), (200, 30, 90), np.uint8)
    write_image(tmp_path / name, image)
    write_image(tmp_path / name, image)
    (tmp_path / f"other_{name}").write_bytes(b"a photo")
    assert "exists" in message(write_image, tmp_path / f"other_{name}", image)
    with Image.open(tmp_path / name) as opened:
        assert GENERATOR in str(opened.info)
        np.testing.assert_allclose(np.asarray(opened), image, atol=0 if name.endswith("png") else 10)


@pytest.mark.parametrize("names", [("$\\frac{$", "$\\alpha$"), ("a" * 80, "a" * 79 + "b"), ("left\nright", "рука")])
def test_labels_have_the_class_names_and_do_not_overlap(names):
    """The names are not math text, and long names keep their ends."""
    image, metadata = np.zeros((70, 90, 3), np.uint8), Metadata(thing_classes=names, thing_colors=[(0, 0, 255)])

    def draw_objects(*classes: int) -> np.ndarray:
        objects = [{"bbox": [1, 30, 88, 20], "category_id": index} for index in classes]
        return draw_instances(image, objects, metadata, scale=4)

    first, second, both = (draw_objects(*classes) for classes in ((0,), (1,), (0, 1)))
    titled = [sheet(name, [[("", image)]]) for name in names]
    assert (first != second).any() and (titled[0] != titled[1]).any()
    # Labels have red pixels, and boxes have none.
    (rows,) = np.any(first != both, axis=(1, 2)).nonzero()
    assert len(rows) and (first[rows.min() - 1 : rows.max() + 2, ..., 0] == 0).all()


def test_drawings_of_an_evaluation(trained_run, shapes, tmp_path, caplog):
    """Each evaluation draws the same images. If a drawing fails, a warning is logged."""
    shutil.copytree(trained_run / "inference", tmp_path / "inference")

    def draw_images(number: int, name: str) -> list[Path]:
        keys = ["OUTPUT_DIR", str(tmp_path), "TEST.NUM_VISUALIZED_IMAGES", str(number)]
        draw_evaluation(load_config(trained_run / "config.yaml", keys), name=name)
        return sorted(tmp_path.glob(f"drawings/shapes_val_{name}.jpg"))

    assert draw_images(0, "none") == [] and not (tmp_path / "drawings").exists()
    first, second, more = (draw_images(number, name)[0] for number, name in ((2, "0010"), (2, "0020"), (4, "more")))
    assert first.read_bytes() == second.read_bytes()
    assert len(cv2.imread(str(more))) > 1.5 * len(cv2.imread(str(first)))
    (tmp_path / "inference/coco_instances_results.json").write_text("[")
    assert draw_images(2, "damaged") == []
    assert "shapes_val" in caplog.text and "coco_instances_results.json" in caplog.text


# Training samples ----------------------------------------------------------------------------------------------------


def read(path: Path) -> np.ndarray:
    return cv2.imread(str(path))[..., ::-1]


@pytest.mark.parametrize("detector", slow_except(["mask_rcnn", "retinanet"], ["mask_rcnn"]))
def test_samples_are_the_first_images_of_a_run(shapes, tmp_path, detector):
    keys = ["INPUT.AUGMENTATION", {"mask_rcnn": "lsj_copy_paste", "retinanet": "lsj"}[detector], "INPUT.LSJ.SIZE", "64"]
    keys += ["SOLVER.IMS_PER_BATCH", "3", "SEED", "11", "DATALOADER.NUM_WORKERS", "1"]
    cfg = small_config(detector, *keys)
    paths = draw_samples(cfg, tmp_path / "drawn", number=4)
    loader = Trainer.build_train_loader(cfg)
    loader.start(seed=11, iteration=0)
    samples = list(islice(chain.from_iterable(loader), 4))
    for index, (path, sample) in enumerate(zip(paths, samples, strict=True)):
        assert path.name == f"{index:04d}_{Path(sample['file_name']).stem}.png"
        drawn = read(path)
        assert (drawn == draw_sample(cfg, sample)).all()
        assert max(drawn.shape[0] - 2 * HEADER - GAP, drawn.shape[1] - GAP) == pytest.approx(640, abs=2)
    others = draw_samples(cfg, tmp_path / "others", number=4, seed=12)
    assert [path.read_bytes() for path in others] != [path.read_bytes() for path in paths]


def test_labels_of_stuff_are_drawn_below_objects(panoptic_root, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(panoptic_root))
    cfg = panoptic_config("SOLVER.IMS_PER_BATCH", "1")
    register_datasets(cfg)
    loader = Trainer.build_train_loader(cfg)
    loader.start(seed=0, iteration=0)
    sample = next(iter(loader))[0]
    ignored = torch.full_like(sample["sem_seg"], 255)
    left_half = ignored.clone()
    left_half[:, : ignored.shape[1] // 2] = 1
    bare, tinted = (draw_sample(cfg, sample | {"sem_seg": labels}) for labels in (ignored, left_half))
    height = (len(bare) - HEADER) // 2
    objects, labels = (np.any(bare != tinted, axis=2)[HEADER + top :][:height, :-GAP] for top in (0, height))
    assert not objects.any()
    middle = labels.shape[1] // 2
    assert labels[HEADER:-GAP, : middle - 20].mean() > 0.9 and not labels[:, middle + 20 :].any()
    # A detector without a semantic head has no semantic labels.
    cfg = panoptic_config("MODEL.META_ARCHITECTURE", "GeneralizedRCNN")
    assert (draw_sample(cfg, sample) == bare[: HEADER + height]).all()


@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_colors_and_boxes_of_a_sample(shapes, image_format):
    """A red image with a box, in the channel order of the model."""
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
