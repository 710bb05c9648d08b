"""Drawn samples are what a run trains on."""

from itertools import chain, islice
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from backbones import InputError
from projects_vil.data import load_dataset, register_datasets, write_shapes_dataset
from projects_vil.engine import Trainer
from projects_vil.visualization import draw_samples
from projects_vil.visualization.panels import HEADER
from projects_vil.visualization.samples import SMALLEST_DRAWN, draw_sample, sample_title
from tests.projects_vil.helpers import small_config
from tests.projects_vil.panoptic import panoptic_config

BATCH = ["SOLVER.IMS_PER_BATCH", "3"]
STRONG, LSJ = (["INPUT.AUGMENTATION", name, "INPUT.LSJ.SIZE", "64"] for name in ("strong", "lsj"))


def read(path: Path) -> np.ndarray:
    return cv2.imread(str(path))[..., ::-1]


@pytest.mark.parametrize("detector, keys", [("mask_rcnn", STRONG), ("mask_rcnn", []), ("retinanet", LSJ)])
def test_the_first_images_of_a_run(shapes, tmp_path, detector, keys):
    cfg = small_config(detector, *keys, *BATCH, "SEED", "11", "DATALOADER.NUM_WORKERS", "1")
    paths = draw_samples(cfg, tmp_path / "drawn", number=4)
    loader = Trainer.build_train_loader(cfg)
    loader.start(seed=11, iteration=0)
    samples = list(islice(chain.from_iterable(loader), 4))
    loader.stop()
    for place, (path, sample) in enumerate(zip(paths, samples, strict=True)):
        assert path.name == f"{place:04d}_{Path(sample['file_name']).stem}.png"
        drawn = read(path)
        assert (drawn == draw_sample(cfg, sample)).all()
        height, width = sample["image"].shape[1:]
        assert max(drawn.shape[0] - HEADER, drawn.shape[1]) == pytest.approx(SMALLEST_DRAWN, abs=2)
        assert (drawn.shape[0] - HEADER) / drawn.shape[1] == pytest.approx(height / width, abs=0.02)
    assert sorted((tmp_path / "drawn").iterdir()) == paths
    others = draw_samples(cfg, tmp_path / "others", number=4, seed=12)
    assert [path.read_bytes() for path in others] != [path.read_bytes() for path in paths]


def test_the_title_says_which_is_the_height():
    sample = {"file_name": "a/b.png", "pasted_from": "a/c.png", "image": torch.zeros(3, 152, 128)}
    assert sample_title(sample) == "b.png + c.png, height 152, width 128"
    sample["instances"] = Instances((152, 128), gt_boxes=Boxes(torch.zeros(2, 4)))
    assert sample_title(sample).endswith("width 128, objects: 2")


def test_labels_are_drawn(tmp_path, monkeypatch):
    write_shapes_dataset(tmp_path / "shapes_sem_seg", num_train=2, num_val=1, short_side=64, task="sem_seg")
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    cfg = small_config("semantic_fpn", "SOLVER.IMS_PER_BATCH", "1")
    register_datasets(cfg)
    (path,) = draw_samples(cfg, tmp_path / "drawn", number=1)
    assert len(np.unique(read(path)[HEADER:].reshape(-1, 3), axis=0)) > 10


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
    nothing, background = (draw_sample(cfg, sample | {"sem_seg": labels})[HEADER:] for labels in (ignored, left_half))
    objects, labels = np.split((nothing != background).any(axis=2), 2)
    middle = labels.shape[1] // 2
    assert labels[:, : middle - 20].mean() > 0.9 and not labels[:, middle + 20 :].any() and not objects.any()
    # A detector of things alone learns nothing from them.
    cfg = panoptic_config("MODEL.META_ARCHITECTURE", "GeneralizedRCNN")
    assert (draw_sample(cfg, sample)[HEADER:] == background[: len(objects)]).all()


@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_colours_and_boxes(shapes, image_format):
    """A red image, in the order of channels that the model gets, with a box."""
    image = torch.zeros(3, 40, 64, dtype=torch.uint8)
    image[image_format.index("R")] = 200
    instances = Instances((40, 64), gt_boxes=Boxes(torch.tensor([[8.0, 10.0, 40.0, 30.0]])))
    instances.gt_classes = torch.tensor([0])
    sample = {"file_name": "a/b.jpg", "image": image, "instances": instances}
    cfg = small_config("retinanet", "INPUT.FORMAT", image_format)
    # Reads the names of the classes.
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    drawn = draw_sample(cfg, sample)[HEADER:].astype(int)
    assert drawn.shape[:2] == (400, 640) and (abs(drawn[20, 600] - [200, 0, 0]) < 8).all()
    assert (abs(drawn[200, 240] - [200, 0, 0]) < 8).all()
    edges = abs(drawn - [200, 0, 0]).max(axis=2) > 30
    assert edges[200, 76:85].any() and edges[200, 396:405].any() and edges[296:305, 240].any()
    assert not edges[200, 100:380].any()


@pytest.mark.parametrize(
    "options, text",
    [({"number": 0}, "--number 0: it is 1 or more"), ({"seed": -1}, "--seed -1: it is 0 or more, and below 2^63")],
)
def test_what_cannot_be_drawn(shapes, tmp_path, options, text):
    with pytest.raises(InputError) as caught:
        draw_samples(small_config(), tmp_path / "drawn", **options)
    assert str(caught.value) == text and not (tmp_path / "drawn").exists()


def test_drawings_of_another_call_do_not_stand_between_these(shapes, tmp_path):
    (tmp_path / "0000_notes.txt").write_text("mine")
    (path,) = draw_samples(small_config(), tmp_path, number=1)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        draw_samples(small_config(), tmp_path, number=2, seed=5)
    assert str(caught.value) == (
        f"--output {tmp_path} has drawings of an earlier call ({path.name}): choose another folder"
    )
    assert {file.name for file in tmp_path.iterdir()} == {"0000_notes.txt", path.name} and path.read_bytes() == before


def test_a_folder_that_is_a_file(shapes, tmp_path):
    (tmp_path / "drawn").write_text("")
    with pytest.raises(InputError, match="drawn: it is a file, and a folder is needed$"):
        draw_samples(small_config(), tmp_path / "drawn", number=1)
