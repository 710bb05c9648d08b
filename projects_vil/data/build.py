"""Records and loaders, which say clearly what is wrong with a file."""

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import (
    MetadataCatalog,
    build_detection_test_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.build import print_instances_class_histogram
from detectron2.data.samplers import RandomSubsetTrainingSampler, RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.config import is_segmentor, number_of_classes
from projects_vil.data.catalog import check_files, read_class_names
from projects_vil.data.dataset_mapper import Mapper, SemSegMapper
from projects_vil.data.datasets.ade20k import IGNORED_LABEL
from projects_vil.data.samplers import BatchStream, SeededRecords, TrainLoader

TRAIN_SAMPLERS = ("TrainingSampler", "RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")


def load_dataset(cfg: CfgNode, names: Iterable[str], *, train: bool) -> list[dict[str, Any]]:
    """The records of some datasets in detectron2's format; for training without images that have no annotation.

    Raises:
        InputError: for an unknown name, a missing file or folder, an annotation file that is not COCO JSON, images
            that are not there, boxes where the model learns from label images or the other way round, a number of
            classes that is not the config's, or nothing to train on.
    """
    names = list(names)
    if not names:
        raise InputError(f"DATASETS.{'TRAIN' if train else 'TEST'} is empty: name a dataset")
    for name in names:
        check_files(name)
    try:
        records = get_detection_dataset_dicts(
            names, filter_empty=train and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, check_consistency=False
        )
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{_annotations(names)} is not JSON: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{_annotations(names)} is not a COCO annotation file: {type(error).__name__} {error}"
        ) from error
    except AssertionError as error:
        if any(MetadataCatalog.get(name).get("sem_seg_root") for name in names):
            raise InputError(f"{_annotations(names)}: {error}") from error
        if "No valid data" not in str(error):
            raise InputError(f"{_annotations(names)} is not a COCO annotation file: {error}") from error
        records = []
    if not records:
        raise InputError(f"{_annotations(names)} has no image {'with an annotation' if train else ''} to work on")
    _check_task(cfg, names, records)
    _check_annotations(cfg, names, records, train=train)
    _check_images(names, records)
    for name in names:
        _check_classes(cfg, name, names[0])
    if train and not is_segmentor(cfg):
        print_instances_class_histogram(records, _class_names(cfg, names[0]))
    return records


def check_datasets(cfg: CfgNode, names: Sequence[str]) -> None:
    """What can be checked of some datasets that are used together without reading their annotations.

    Raises:
        InputError: for an unknown name, a missing file or folder, or a number of classes that is not the config's.
    """
    for name in names:
        check_files(name)
        _check_classes(cfg, name, names[0])


def build_train_loader(cfg: CfgNode) -> TrainLoader:
    """Batches of ``DATASETS.TRAIN``, sampled and grouped as by detectron2's training loader.

    What a batch holds, and how it is augmented, depend on the seed and the iteration alone
    (:class:`~projects_vil.data.samplers.TrainLoader`), not on the number of worker processes.

    Raises:
        InputError: where :func:`load_dataset` would, and for an unknown ``DATALOADER.SAMPLER_TRAIN``.
    """
    records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, TRAIN_SAMPLERS)
    world_size = comm.get_world_size()
    batches = BatchStream(
        functools.partial(_sampler, cfg, records),
        batch_size=cfg.SOLVER.IMS_PER_BATCH // world_size,
        groups=_aspect_groups(records) if cfg.DATALOADER.ASPECT_RATIO_GROUPING else [0] * len(records),
        rank=comm.get_rank(),
        world_size=world_size,
    )
    dataset = SeededRecords(records, build_mapper(cfg, is_train=True))
    return TrainLoader(dataset, batches, num_workers=cfg.DATALOADER.NUM_WORKERS)


def _sampler(cfg: CfgNode, records: list[dict[str, Any]], seed: int) -> torch.utils.data.Sampler[int]:
    name = cfg.DATALOADER.SAMPLER_TRAIN
    if name == "RepeatFactorTrainingSampler":
        factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
            records, cfg.DATALOADER.REPEAT_THRESHOLD
        )
        return RepeatFactorTrainingSampler(factors, seed=seed)
    if name == "RandomSubsetTrainingSampler":
        ratio = cfg.DATALOADER.RANDOM_SUBSET_RATIO
        return RandomSubsetTrainingSampler(len(records), ratio, seed_shuffle=seed, seed_subset=seed)
    return TrainingSampler(len(records), seed=seed)


def _aspect_groups(records: list[dict[str, Any]]) -> list[int]:
    """0 for images that are wider than high, 1 for others, and for records that do not tell."""
    return [0 if record.get("width", 0) > record.get("height", 0) else 1 for record in records]


def build_test_loader(cfg: CfgNode, dataset_name: str) -> torch.utils.data.DataLoader:
    """detectron2's test loader over one dataset, an image a batch."""
    records = load_dataset(cfg, [dataset_name], train=False)
    return build_detection_test_loader(
        dataset=records, mapper=build_mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS
    )


def build_mapper(cfg: CfgNode, *, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The mapper of a detector, or of a SemanticSegmentor."""
    return SemSegMapper(cfg, is_train=is_train) if is_segmentor(cfg) else Mapper(cfg, is_train=is_train)


def _check_task(cfg: CfgNode, names: list[str], records: list[dict[str, Any]]) -> None:
    if not is_segmentor(cfg):
        if any("annotations" not in record and "sem_seg_file_name" in record for record in records):
            raise InputError(
                f"{', '.join(names)}: label images, and no boxes for a {cfg.MODEL.META_ARCHITECTURE}; it takes a "
                "dataset of DATASETS.COCO"
            )
        return
    if not all("sem_seg_file_name" in record for record in records):
        raise InputError(
            f"{', '.join(names)}: no label images for a SemanticSegmentor; it takes a dataset of DATASETS.ADE20K"
        )
    if cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE != IGNORED_LABEL:
        raise InputError(
            f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE}: it is {IGNORED_LABEL}"
        )


def _check_annotations(cfg: CfgNode, names: list[str], records: list[dict[str, Any]], *, train: bool) -> None:
    annotations = [annotation for record in records for annotation in record.get("annotations", ())]
    for annotation in annotations:
        box = annotation.get("bbox")
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(isinstance(n, (int, float)) for n in box):
            raise InputError(f"{_annotations(names)} has the bbox {box!r}: it is [left, top, width, height]")
    if train and cfg.MODEL.MASK_ON and not any("segmentation" in annotation for annotation in annotations):
        raise InputError(f"{_annotations(names)} has no segmentation to learn masks from: add MODEL.MASK_ON False")


def _check_images(names: Iterable[str], records: list[dict[str, Any]]) -> None:
    present = {
        folder: set(os.listdir(folder))
        for folder in {os.path.dirname(record["file_name"]) for record in records}
        if os.path.isdir(folder)
    }
    missing = [
        record["file_name"]
        for record in records
        if os.path.basename(record["file_name"]) not in present.get(os.path.dirname(record["file_name"]), ())
    ]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(records)} images of {', '.join(names)} are missing, the first is {missing[0]}"
        )


def _check_classes(cfg: CfgNode, name: str, first: str) -> None:
    classes = _class_names(cfg, name)
    if classes is None:
        return
    key, number = number_of_classes(cfg)
    if len(classes) != number:
        raise InputError(f"{key} is {number}, and {name} has {len(classes)} classes: add {key} {len(classes)}")
    if classes != _class_names(cfg, first):
        raise InputError(f"{first} and {name} have other classes, or the same in another order: they cannot be mixed")


def _class_names(cfg: CfgNode, name: str) -> list[str] | None:
    """From the catalog or, before detectron2 has read a COCO file, from the file; None where neither says."""
    metadata = MetadataCatalog.get(name)
    if is_segmentor(cfg):
        return metadata.get("stuff_classes")
    return metadata.get("thing_classes") or read_class_names(metadata.get("json_file"))


def _annotations(names: Iterable[str]) -> str:
    return ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names)
