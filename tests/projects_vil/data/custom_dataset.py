"""Register, load and edit a small custom COCO dataset, which tests corrupt."""

import json
import random

import numpy as np

from projects_vil.data import load_dataset, register_datasets
from tests.projects_vil.helpers import small_config

NAME = "data_test"


def entry(folder, name: str = NAME) -> list[str]:
    return [name, str(folder / "annotations.json"), str(folder / "images")]


def config(*entries, detector: str = "retinanet", overrides=()):
    names = ["DATASETS.TRAIN", f"('{NAME}',)", "DATASETS.TEST", f"('{NAME}',)"]
    return small_config(detector, "DATASETS.COCO", repr(list(entries)), *names, *overrides)


def load(folder, *overrides, detector: str = "retinanet", train: bool = True, **options) -> list[dict]:
    cfg = config(entry(folder), detector=detector, overrides=overrides)
    register_datasets(cfg)
    return load_dataset(cfg, [NAME], train=train, **options)


def mapped(mapper, record: dict, *, seed: int = 0) -> dict:
    np.random.seed(seed)
    random.seed(seed)
    return mapper(record)


def edit(folder, change) -> None:
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_image(folder):
    content = json.loads((folder / "annotations.json").read_text())
    return folder / "images" / content["images"][0]["file_name"]


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
