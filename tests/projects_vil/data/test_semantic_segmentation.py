"""Test semantic segmentation data: published labels, the same augmentation as the image, and error messages."""

import shutil

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from examples.make_shapes_dataset import SHAPES_SEM_SEG_CLASSES
from projects_vil.data import IGNORED_LABEL, Mapper, label_reader, load_dataset, register_datasets
from projects_vil.data.catalog import ADE20K_SEM_SEG_CATEGORIES, read_classes
from projects_vil.data.image_files import read_labels
from tests.projects_vil.data.custom_dataset import mapped
from tests.projects_vil.helpers import message, small_config

NAME = "sem_seg_test"
CROPPED = ["INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(70, 90)"]


def mapper(*overrides: str, is_train: bool = True) -> Mapper:
    return Mapper(small_config("semantic_fpn", *overrides), is_train=is_train)


@pytest.fixture
def copy(shapes_sem_seg, tmp_path):
    """Return the folder of a small dataset: images/, labels/ and classes.txt."""
    shutil.copytree(shapes_sem_seg / "images/validation", tmp_path / "images")
    shutil.copytree(shapes_sem_seg / "annotations/validation", tmp_path / "labels")
    shutil.copy(shapes_sem_seg / "classes.txt", tmp_path)
    yield tmp_path
    if NAME in DatasetCatalog.list():
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)


def load(folder, *overrides: str, classes: bool = True, detector: str = "semantic_fpn") -> list[dict]:
    entry = [NAME, str(folder / "images"), str(folder / "labels")] + [str(folder / "classes.txt")] * classes
    cfg = small_config(detector, "DATASETS.ADE20K", repr([entry]), *overrides)
    register_datasets(cfg)
    return load_dataset(cfg, [NAME], train=True)


# -- registration and folders ----------------------------------------------------------------------


def test_ade20k_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    cfg = small_config("semantic_fpn")
    register_datasets(cfg)
    ade20k = MetadataCatalog.get("ade20k_train")
    assert ade20k.image_root == str(tmp_path / "ADEChallengeData2016/images/training")
    assert ade20k.sem_seg_root == str(tmp_path / "ADEChallengeData2016/annotations/training")
    assert len(ade20k.stuff_classes) == 150 and ade20k.stuff_classes[0] == "wall"
    assert ade20k.image_root in message(load_dataset, cfg, ["ade20k_train"], train=True)


def test_custom_dataset(copy):
    first = min((copy / "images").iterdir())
    Image.open(first).save(first.with_suffix(".webp"))
    first.unlink()
    assert [record["first_label"] for record in load(copy)] == [1] * 6
    assert MetadataCatalog.get(NAME).stuff_classes == list(SHAPES_SEM_SEG_CLASSES)
    assert NAME in message(load, copy, classes=False)
    assert "DATASETS.COCO" in message(load, copy, detector="retinanet")
    assert "IGNORE_VALUE" in message(load, copy, "MODEL.SEM_SEG_HEAD.IGNORE_VALUE", "0")
    for wrong in (["name", "images"], ["name", "images", 3], ["", "images", "labels"]):
        cfg = small_config("semantic_fpn", "DATASETS.ADE20K", repr([wrong]))
        assert "DATASETS.ADE20K" in message(register_datasets, cfg)


def test_default_classes_of_ade20k(copy):
    assert message(load, copy, classes=False).endswith("Set MODEL.SEM_SEG_HEAD.NUM_CLASSES 150.")
    assert MetadataCatalog.get(NAME).stuff_classes == list(ADE20K_SEM_SEG_CATEGORIES)


def test_missing_files_are_named(copy):
    label = min((copy / "labels").iterdir())
    label.unlink()
    assert str(label) in message(load, copy)
    for name in ("labels", "images"):
        shutil.rmtree(copy / name)
        assert str(copy / name) in message(load, copy)
        (copy / name).mkdir()
    # The folder is empty.
    assert str(copy / "images") in message(load, copy)


def test_a_dataset_without_labels(shapes):
    text = message(load_dataset, small_config("semantic_fpn"), ["shapes_val"], train=True)
    assert "SemanticSegmentor" in text


# -- label images ----------------------------------------------------------------------------------


def test_class_names(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("wall\n\n building, edifice \nciel à l'aube\n", encoding="utf-8")
    assert read_classes(path) == ["wall", "building, edifice", "ciel à l'aube"]
    for content in (b"", b"\xff\xfe\x00", b"sky\nsea\nsky\n", b"".join(b"%d\n" % index for index in range(255))):
        path.write_bytes(content)
        assert str(path) in message(read_classes, path)


def write_labels(path, labels, *, palette: bool = False):
    image = Image.fromarray(np.array(labels, np.uint8))
    if palette:
        image.putpalette(list(range(255, -1, -1)) * 3)
    image.save(path)
    return path


@pytest.mark.parametrize("palette", [False, True])
def test_published_labels_are_shifted_and_prepared_ones_are_not(tmp_path, palette):
    path = write_labels(tmp_path / "a.png", [[0, 1, 2], [3, 150, 0]], palette=palette)
    labels = read_labels(path, first_label=1, num_classes=150)
    assert labels.dtype == np.uint8
    assert labels.tolist() == [[IGNORED_LABEL, 0, 1], [2, 149, IGNORED_LABEL]]
    path = write_labels(tmp_path / "b.png", [[0, 1, 255], [3, 149, 0]], palette=palette)
    labels = label_reader("ade20k_sem_seg_val")(path, dtype=int)
    assert labels.dtype == int and labels.tolist() == [[0, 1, 255], [3, 149, 0]]


def test_labels_that_cannot_be_used_are_named(copy, tmp_path):
    path = tmp_path / "a.png"
    for first_label, label in ((1, 5), (1, 255), (0, 4)):
        write_labels(path, [[0, 1, label]])
        text = message(read_labels, path, first_label=first_label, num_classes=4)
        assert str(path) in text and str(label) in text
    for mode in ("RGB", "I;16", "1"):
        Image.new(mode, (5, 3)).save(path)
        assert str(path) in message(read_labels, path, first_label=1, num_classes=4)
    record = load(copy)[0]
    path = min((copy / "labels").iterdir())
    path.write_bytes(path.read_bytes()[:60])
    assert str(path) in message(mapper(), record)
    write_labels(path, np.ones((30, 20)))
    for is_train in (True, False):
        assert str(path) in message(mapper(is_train=is_train), record)


# -- mapper ----------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path) -> dict:
    """Return the record of an image (84, 132) in blocks of 12 pixels, whose red channel is the label."""
    rows, cols = np.mgrid[:84, :132] // 12
    labels = (5 * rows + cols) % 5
    image = np.zeros((84, 132, 3), np.uint8)
    image[..., 2] = 50 * labels
    cv2.imwrite(str(tmp_path / "a.png"), image)
    write_labels(tmp_path / "labels.png", labels)
    return {"file_name": str(tmp_path / "a.png"), "sem_seg_file_name": str(tmp_path / "labels.png"), "first_label": 1}


@pytest.mark.parametrize("flip", ["horizontal", "vertical"])
def test_labels_are_augmented_as_their_image(record, flip):
    train, firsts = mapper(*CROPPED, "INPUT.RANDOM_FLIP", flip), set()
    for seed in range(12):
        sample = mapped(train, record, seed=seed)
        image, labels = sample["image"], sample["sem_seg"]
        assert (image.shape, image.dtype) == ((3, 40, 56), torch.uint8)
        assert (labels.shape, labels.dtype) == ((40, 56), torch.int64)
        assert set(labels.unique().tolist()) <= {0, 1, 2, 3, IGNORED_LABEL}
        coded = (image[0].float() / 50).round().long() - 1
        coded[coded < 0] = IGNORED_LABEL
        # The image is interpolated only along the edges of the blocks.
        assert (coded == labels).float().mean() > 0.8
        firsts.add(tuple(labels[20, :30].tolist()))
    assert len(firsts) > 6
    assert (sample["height"], sample["width"]) == (84, 132) and "sem_seg_file_name" not in sample


def test_the_crop_is_taken_from_the_resized_image(record):
    """If the crop came first, as in detectron2's mapper, images would have the sizes of the resize."""
    train = mapper("INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(30, 50)")
    shapes = {tuple(train(record)["sem_seg"].shape) for _ in range(40)}
    assert max(height for height, _ in shapes) == 40 and min(height for height, _ in shapes) < 40
    assert {width for _, width in shapes} >= {56}


def test_a_crop_of_one_class_is_sampled_again(record):
    labels = np.ones((84, 132), np.uint8)
    labels[:, 100:] = 2
    write_labels(record["sem_seg_file_name"], labels)
    sizes = ["INPUT.CROP.SIZE", "[60, 40]", "INPUT.MIN_SIZE_TRAIN", "(84, 84)", "INPUT.CROP.SINGLE_CATEGORY_MAX_AREA"]
    shares = {}
    for limit in ("0.75", "1.0"):
        train = mapper(*sizes, limit)
        np.random.seed(0)
        crops = [train(record)["sem_seg"] for _ in range(40)]
        shares[limit] = np.mean([(crop == 0).float().mean() <= 0.75 for crop in crops])
    assert shares["0.75"] > 0.7 > 0.5 > shares["1.0"]


def test_a_small_image_is_padded_to_the_crop(record):
    """The padding matches ``Pad`` in the official ADE20K config: labels 255, and 0 in the normalized image."""
    sizes = ["INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(30, 30)", "INPUT.CROP.PAD", "True"]
    sample = mapper(*sizes)(record)
    image, labels = sample["image"], sample["sem_seg"]
    assert (image.shape, labels.shape, labels.dtype) == ((3, 40, 56), (40, 56), torch.int64)
    padding = torch.ones(40, 56, dtype=torch.bool)
    padding[:30, :47] = False
    assert (labels[padding] == IGNORED_LABEL).all() and (labels[~padding] != IGNORED_LABEL).any()
    mean = torch.tensor(small_config("semantic_fpn").MODEL.PIXEL_MEAN)
    assert (image[:, padding] - mean[:, None] == 0).all()
    assert (image[:, ~padding] == image[:, ~padding].round()).all()
    for other in (["INPUT.MIN_SIZE_TRAIN", "(60, 60)"], ["INPUT.CROP.PAD", "False"]):
        assert mapper(*sizes, *other)(record)["image"].dtype == torch.uint8


def test_colors_change_and_labels_do_not(record):
    distortion = ["INPUT.PHOTOMETRIC_DISTORTION", "True"]
    plain, distorting = mapper(*CROPPED), mapper(*CROPPED, *distortion)
    pairs = [[mapped(train, record, seed=seed) for train in (plain, distorting)] for seed in range(12)]
    assert all(torch.equal(one["sem_seg"], other["sem_seg"]) for one, other in pairs)
    assert sum(not torch.equal(one["image"], other["image"]) for one, other in pairs) > 6
    testing, expected = mapper(*distortion, is_train=False)(record), mapper(is_train=False)(record)
    assert torch.equal(testing["image"], expected["image"]) and "sem_seg" not in testing
