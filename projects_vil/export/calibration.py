"""int8: the images that its ranges are measured on."""

from detectron2.config import CfgNode
from torch import Tensor

from backbones import InputError
from projects_vil.data import load_dataset, register_datasets
from projects_vil.export.report import comparison_images

CALIBRATION_IMAGES = 100


def check_calibration(cfg: CfgNode, calibration_images: int) -> None:
    if calibration_images < 1:
        raise InputError(f"--calibration-images {calibration_images}: it is 1 or more")
    register_datasets(cfg)
    load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)


def calibrating(cfg: CfgNode, number: int) -> list[Tensor]:
    """Images (3, H, W) uint8 from all over ``DATASETS.TRAIN``, prepared as for testing: ``number`` of them, or all."""
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    number = min(number, len(records))
    return comparison_images(cfg, [records[i * len(records) // number]["file_name"] for i in range(number)])
