"""Semantic segmentation: labels as published, augmented as their images, and errors that name the file."""

import shutil

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from projects_vil.data import (
    IGNORED_LABEL,
    Mapper,
    build_test_loader,
    build_train_loader,
    label_reader,
    load_dataset,
    register_datasets,
)
from projects_vil.data.catalog import ADE20K_SEM_SEG_CATEGORIES, read_classes
from projects_vil.data.detection_utils import read_labels
from projects_vil.data.shapes import SHAPES_SEM_SEG_CLASSES
from projects_vil.engine.checks import check_values
from tests.projects_vil.data.own import message
from tests.projects_vil.helpers import small_config

NAME = "sem_seg_test"
CROPPED = ["INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(70, 90)"]


def config(*overrides: str):
    return small_config("semantic_fpn", *overrides)


@pytest.fixture
def copy(shapes_sem_seg, tmp_path):
    """A small dataset in a folder of its own: images/, labels/ and classes.txt."""
    shutil.copytree(shapes_sem_seg / "images/validation", tmp_path / "images")
    shutil.copytree(shapes_sem_seg / "annotations/validation", tmp_path / "labels")
    shutil.copy(shapes_sem_seg / "classes.txt", tmp_path)
    yield tmp_path
    if NAME in DatasetCatalog.list():
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)


def own_config(folder, *overrides: str, classes: bool = True):
    entry = [NAME, str(folder / "images"), str(folder / "labels")] + [str(folder / "classes.txt")] * classes
    names = ["DATASETS.TRAIN", f"('{NAME}',)", "DATASETS.TEST", f"('{NAME}',)"]
    return config("DATASETS.ADE20K", repr([entry]), *names, *overrides)


def load(folder, *overrides: str, classes: bool = True) -> list[dict]:
    cfg = own_config(folder, *overrides, classes=classes)
    register_datasets(cfg)
    return load_dataset(cfg, [NAME], train=True)


def first_labels(folder):
    return sorted((folder / "labels").iterdir())[0]


# -- registration and folders ----------------------------------------------------------------------


def test_own_datasets_follow_the_environment(shapes_sem_seg, tmp_path, monkeypatch):
    metadata = MetadataCatalog.get("shapes_sem_seg_val")
    assert metadata.sem_seg_root == str(shapes_sem_seg / "annotations/validation")
    assert metadata.stuff_classes == list(SHAPES_SEM_SEG_CLASSES)
    assert len(load_dataset(config(), ["shapes_sem_seg_train"], train=True)) == 8
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_datasets(config())
    ade20k = MetadataCatalog.get("ade20k_train")
    assert ade20k.image_root == str(tmp_path / "ADEChallengeData2016/images/training")
    assert ade20k.sem_seg_root == str(tmp_path / "ADEChallengeData2016/annotations/training")
    assert len(ade20k.stuff_classes) == 150 and ade20k.stuff_classes[0] == "wall"
    text = message(load_dataset, config(), ["ade20k_train"], train=True)
    assert ade20k.image_root in text


def test_own_dataset_given_as_an_override(copy):
    records = load(copy)
    assert [record["first_label"] for record in records] == [1] * 6
    assert MetadataCatalog.get(NAME).stuff_classes == list(SHAPES_SEM_SEG_CLASSES)
    register_datasets(own_config(copy))
    assert NAME in message(register_datasets, own_config(copy, classes=False))


def test_classes_of_ade20k_where_none_are_named(copy):
    register_datasets(own_config(copy, classes=False))
    assert MetadataCatalog.get(NAME).stuff_classes == list(ADE20K_SEM_SEG_CATEGORIES)
    key = "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    assert message(load, copy, classes=False).endswith(f"add {key} 150")
    assert len(load(copy, key, "150", classes=False)) == 6


@pytest.mark.parametrize("wrong", [["name", "images"], ["name", "images", 3], ["", "images", "labels"]])
def test_entry_of_the_wrong_form(wrong):
    assert "DATASETS.ADE20K" in message(register_datasets, config("DATASETS.ADE20K", repr([wrong])))


@pytest.mark.parametrize("case", ["no images", "no labels", "no image folder", "no label folder", "one label missing"])
def test_missing_files_are_named(copy, case):
    path = copy / ("images" if "image" in case else "labels")
    if case == "one label missing":
        path = first_labels(copy)
        path.unlink()
    else:
        shutil.rmtree(path)
        if not case.endswith("folder"):
            path.mkdir()
    assert str(path) in message(load, copy)


def test_images_of_every_suffix_are_found(copy):
    first = min((copy / "images").iterdir())
    Image.open(first).save(first.with_suffix(".webp"))
    first.unlink()
    assert len(load(copy)) == 6


def test_datasets_and_keys_of_another_task(copy, shapes):
    assert "SemanticSegmentor" in message(load_dataset, config(), ["shapes_val"], train=True)
    register_datasets(own_config(copy))
    assert "DATASETS.COCO" in message(load_dataset, small_config("retinanet"), [NAME], train=False)
    assert "IGNORE_VALUE" in message(load, copy, "MODEL.SEM_SEG_HEAD.IGNORE_VALUE", "0")


# -- label images ----------------------------------------------------------------------------------


def test_class_names(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("wall\n\n building, edifice \nciel à l'aube\n", encoding="utf-8")
    assert read_classes(path) == ["wall", "building, edifice", "ciel à l'aube"]
    for content in (b"", b"\xff\xfe\x00", b"sky\nsea\nsky\n", b"".join(b"%d\n" % index for index in range(255))):
        path.write_bytes(content)
        assert str(path) in message(read_classes, path)
    path.unlink()
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


@pytest.mark.parametrize("first_label, label", [(1, 5), (1, 255), (0, 4)])
def test_labels_without_a_class_are_named(tmp_path, first_label, label):
    path = write_labels(tmp_path / "a.png", [[0, 1, label]])
    text = message(read_labels, path, first_label=first_label, num_classes=4)
    assert f"{path} has the label {label}" in text


def test_label_images_that_cannot_be_used_are_named(copy, tmp_path):
    for mode in ("RGB", "I;16", "1"):
        Image.new(mode, (5, 3)).save(tmp_path / "a.png")
        text = message(read_labels, tmp_path / "a.png", first_label=1, num_classes=4)
        assert str(tmp_path / "a.png") in text and mode in text
    record, path = load(copy)[0], first_labels(copy)
    content = path.read_bytes()
    for size in (0, 20, 60):
        path.write_bytes(content[:size])
        assert str(path) in message(Mapper(config(), is_train=True), record)
    write_labels(path, np.ones((30, 20)))
    for is_train in (True, False):
        assert str(path) in message(Mapper(config(), is_train=is_train), record)


# -- mapper ----------------------------------------------------------------------------------------


def coded_record(folder, height: int, width: int) -> dict:
    """Write an image whose red shows the label, in blocks of 12 pixels, and return its record."""
    rows, cols = np.mgrid[:height, :width] // 12
    labels = (5 * rows + cols) % 5
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 2] = 50 * labels
    cv2.imwrite(str(folder / "a.png"), image)
    write_labels(folder / "labels.png", labels)
    return {"file_name": str(folder / "a.png"), "sem_seg_file_name": str(folder / "labels.png"), "first_label": 1}


@pytest.mark.parametrize("flip", ["none", "vertical"])
def test_labels_are_augmented_as_their_image(tmp_path, flip):
    record = coded_record(tmp_path, 84, 132)
    mapper = Mapper(config(*CROPPED, "INPUT.RANDOM_FLIP", flip), is_train=True)
    firsts = set()
    for seed in range(12):
        np.random.seed(seed)
        mapped = mapper(record)
        image, labels = mapped["image"], mapped["sem_seg"]
        assert (image.shape, image.dtype) == ((3, 40, 56), torch.uint8)
        assert (labels.shape, labels.dtype) == ((40, 56), torch.int64)
        assert set(labels.unique().tolist()) <= {0, 1, 2, 3, IGNORED_LABEL}
        coded = (image[0].float() / 50).round().long() - 1
        coded[coded < 0] = IGNORED_LABEL
        # Only along the edges of blocks the image is interpolated.
        assert (coded == labels).float().mean() > 0.8
        firsts.add(tuple(labels[20, :30].tolist()))
    assert len(firsts) > 6
    assert (mapped["height"], mapped["width"]) == (84, 132)
    assert "sem_seg_file_name" in record and "sem_seg_file_name" not in mapped


def test_flipping_flips_both(tmp_path):
    record = coded_record(tmp_path, 84, 132)
    sizes = ["INPUT.CROP.ENABLED", "False", "INPUT.MIN_SIZE_TRAIN", "(84, 84)"]
    plain = Mapper(config(*sizes, "INPUT.RANDOM_FLIP", "none"), is_train=True)(record)
    mapper = Mapper(config(*sizes, "INPUT.RANDOM_FLIP", "horizontal"), is_train=True)
    seen = set()
    for seed in range(8):
        np.random.seed(seed)
        mapped = mapper(record)
        flipped = not torch.equal(mapped["image"], plain["image"])
        for key in ("image", "sem_seg"):
            assert torch.equal(mapped[key], plain[key].flip(-1) if flipped else plain[key])
        seen.add(flipped)
    assert seen == {True, False}


def test_the_crop_is_taken_from_the_resized_image(tmp_path):
    """Cropped first, as by detectron2's mapper, they would have the sizes of the resize."""
    record = coded_record(tmp_path, 84, 132)
    sizes = ["INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(30, 50)"]
    mapper = Mapper(config(*sizes), is_train=True)
    shapes = {tuple(mapper(record)["sem_seg"].shape) for _ in range(40)}
    assert max(height for height, _ in shapes) == 40 and min(height for height, _ in shapes) < 40
    assert {width for _, width in shapes} >= {56}


def test_a_crop_of_one_class_is_sampled_again(tmp_path):
    labels = np.ones((60, 200), np.uint8)
    labels[:, 160:] = 2
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((60, 200, 3), np.uint8))
    write_labels(tmp_path / "labels.png", labels)
    record = {"file_name": str(tmp_path / "a.png"), "sem_seg_file_name": str(tmp_path / "labels.png"), "first_label": 1}
    sizes = ["INPUT.CROP.SIZE", "[60, 60]", "INPUT.MIN_SIZE_TRAIN", "(60, 60)", "INPUT.CROP.SINGLE_CATEGORY_MAX_AREA"]
    shares = {}
    for limit in ("0.75", "1.0"):
        mapper = Mapper(config(*sizes, limit), is_train=True)
        np.random.seed(0)
        crops = [mapper(record)["sem_seg"] for _ in range(40)]
        shares[limit] = np.mean([(crop == 0).float().mean() <= 0.75 for crop in crops])
    assert shares["0.75"] > 0.7 > 0.4 > shares["1.0"]


def test_a_small_image_is_padded_to_the_crop(tmp_path):
    """As Pad of the official segmentation/configs/_base_/datasets/ade20k.py: labels 255, and 0 after normalisation."""
    record = coded_record(tmp_path, 84, 132)
    sizes = ["INPUT.CROP.SIZE", "[40, 56]", "INPUT.MIN_SIZE_TRAIN", "(30, 30)", "INPUT.CROP.PAD", "True"]
    cfg = config(*sizes)
    mapped = Mapper(cfg, is_train=True)(record)
    image, labels = mapped["image"], mapped["sem_seg"]
    assert (image.shape, labels.shape, labels.dtype) == ((3, 40, 56), (40, 56), torch.int64)
    padding = torch.ones(40, 56, dtype=torch.bool)
    padding[:30, :47] = False
    assert (labels[padding] == IGNORED_LABEL).all() and (labels[~padding] != IGNORED_LABEL).any()
    assert (image[:, padding] - torch.tensor(cfg.MODEL.PIXEL_MEAN)[:, None] == 0).all()
    assert (image[:, ~padding] == image[:, ~padding].round()).all()
    larger = Mapper(config(*sizes, "INPUT.MIN_SIZE_TRAIN", "(60, 60)"), is_train=True)(record)["image"]
    assert (larger.shape, larger.dtype) == ((3, 40, 56), torch.uint8)
    for cropping in (["INPUT.CROP.ENABLED", "False"], ["INPUT.CROP.PAD", "False"]):
        assert Mapper(config(*sizes, *cropping), is_train=True)(record)["image"].shape[1] == 30
    assert Mapper(cfg, is_train=False)(record)["image"].dtype == torch.uint8


def test_crops_that_cannot_be_used():
    text = message(Mapper, config("INPUT.CROP.TYPE", "absolut"), is_train=True)
    assert "INPUT.CROP.TYPE" in text and "did you mean 'absolute'" in text
    cropping = ["INPUT.CROP.TYPE", "relative", "INPUT.CROP.SIZE", "[0.5, 0.5]", "INPUT.CROP.PAD", "True"]
    text = message(Mapper, config(*cropping), is_train=True)
    assert "INPUT.CROP.PAD" in text and "INPUT.CROP.TYPE relative" in text
    assert message(check_values, config(*cropping)) == text


def test_colours_change_and_labels_do_not(tmp_path):
    record = coded_record(tmp_path, 84, 132)
    plain = Mapper(config(*CROPPED, "INPUT.RANDOM_FLIP", "none"), is_train=True)
    distorting = Mapper(
        config(*CROPPED, "INPUT.RANDOM_FLIP", "none", "INPUT.PHOTOMETRIC_DISTORTION", "True"), is_train=True
    )
    differing = 0
    for seed in range(12):
        samples = []
        for mapper in (plain, distorting):
            np.random.seed(seed)
            samples.append(mapper(record))
        assert torch.equal(samples[0]["sem_seg"], samples[1]["sem_seg"])
        differing += not torch.equal(samples[0]["image"], samples[1]["image"])
    assert differing > 6
    testing = Mapper(config("INPUT.PHOTOMETRIC_DISTORTION", "True"), is_train=False)(record)["image"]
    assert torch.equal(testing, Mapper(config(), is_train=False)(record)["image"])


def test_testing_reads_no_labels(copy):
    record = load(copy)[0]
    mapped = Mapper(config("INPUT.MIN_SIZE_TEST", "40"), is_train=False)(record)
    assert "sem_seg" not in mapped and min(mapped["image"].shape[1:]) == 40
    assert (mapped["height"], mapped["width"]) == cv2.imread(record["file_name"]).shape[:2]


# -- loaders ---------------------------------------------------------------------------------------


def test_loaders(shapes_sem_seg):
    cfg = config(*CROPPED, "SOLVER.IMS_PER_BATCH", "4")
    batch = next(iter(build_train_loader(cfg)))
    assert [tuple(record["sem_seg"].shape) for record in batch] == [(40, 56)] * 4
    batches = list(build_test_loader(cfg, "shapes_sem_seg_val"))
    assert len({batch[0]["file_name"] for batch in batches}) == len(batches) == 6
