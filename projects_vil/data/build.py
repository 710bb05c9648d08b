"""Records and loaders, which say clearly what is wrong with a file."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from detectron2.data.build import filter_images_with_only_crowd_annotations, print_instances_class_histogram
from detectron2.data.samplers import RandomSubsetTrainingSampler, RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.config import is_panoptic, is_segmentor, number_of_classes
from projects_vil.data.catalog import check_files, read_class_names
from projects_vil.data.checking import missing_files
from projects_vil.data.copy_paste import CopyPaste
from projects_vil.data.dataset_mapper import Mapper, SemSegMapper
from projects_vil.data.datasets.ade20k import IGNORED_LABEL
from projects_vil.data.datasets.coco import CHECKS, is_coco, load_coco
from projects_vil.data.datasets.panoptic import add_stuff
from projects_vil.data.recipes import is_pasted_on
from projects_vil.data.samplers import BatchStream, EvaluationLoader, SeededRecords, TrainLoader

TRAIN_SAMPLERS = ("TrainingSampler", "RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")
# Records that were read before the loader asks for them.
_READ_AHEAD: dict[tuple, list[dict[str, Any]]] = {}


def load_dataset(
    cfg: CfgNode, names: Iterable[str], *, train: bool, open_images: bool = False, report: bool = True
) -> list[dict[str, Any]]:
    """The records of some datasets in detectron2's format; for training without images that have no annotation.

    COCO files are checked as ``DATASETS.CHECK`` says (:mod:`projects_vil.data.checking`).

    Args:
        open_images: whether the check opens every image file too.
        report: whether what was found, and the table of instances, are logged; a process logs each once.

    Raises:
        InputError: for an unknown name, a missing file or folder, an annotation file that is not COCO JSON, images
            that are not there, what a check finds, boxes where the model learns from label images or the other way
            round, a number of classes that is not the config's, or nothing to train on.
    """
    names = list(names)
    check_choice("DATASETS.CHECK", cfg.DATASETS.CHECK, CHECKS)
    if not names:
        raise InputError(f"DATASETS.{'TRAIN' if train else 'TEST'} is empty: name a dataset")
    for name in names:
        check_files(name)
    try:
        records = [record for name in names for record in _read(cfg, name, open_images=open_images, report=report)]
        if train and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS and records and "annotations" in records[0]:
            records = filter_images_with_only_crowd_annotations(records)
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
        raise InputError(f"{_annotations(names)} is not a COCO annotation file: {error}") from error
    if not records:
        raise InputError(f"{_annotations(names)} has no image {'with an annotation' if train else ''} to work on")
    _check_task(cfg, names, records)
    _check_annotations(cfg, names, records)
    _check_images(names, records)
    for name in names:
        _check_classes(cfg, name, names[0])
    if train and report and not is_segmentor(cfg):
        print_instances_class_histogram(records, class_names(cfg, names[0]))
    return records


def _read(cfg: CfgNode, name: str, *, open_images: bool, report: bool) -> list[dict[str, Any]]:
    if cfg.DATASETS.CHECK == "off" or not is_coco(name):
        records = DatasetCatalog.get(name)
    else:
        masks = cfg.MODEL.MASK_ON
        records = load_coco(name, check=cfg.DATASETS.CHECK, masks=masks, open_images=open_images, report=report)
    return add_stuff(name, records) if is_panoptic(cfg) else records


def read_ahead(cfg: CfgNode) -> None:
    """Read and check the datasets of a training run, before anything of the run is written.

    The loader of :func:`build_train_loader` takes what was read, so that it is read once.

    Raises:
        InputError: as :func:`load_dataset`, for those of the evaluation too.
    """
    for name in cfg.DATASETS.TEST:
        load_dataset(cfg, [name], train=False, open_images=True)
    _READ_AHEAD[_training_key(cfg)] = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True, open_images=True)


def _training_key(cfg: CfgNode) -> tuple:
    """What the records of training depend on."""
    datasets, empty = cfg.DATASETS, cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    return tuple(datasets.TRAIN), str(datasets.COCO), datasets.CHECK, empty, cfg.MODEL.dump()


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
    records = _READ_AHEAD.pop(_training_key(cfg), None)
    if records is None:
        records = load_dataset(cfg, cfg.DATASETS.TRAIN, train=True, open_images=True)
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, TRAIN_SAMPLERS)
    world_size = comm.get_world_size()
    batches = BatchStream(
        functools.partial(_sampler, cfg, records),
        batch_size=cfg.SOLVER.IMS_PER_BATCH // world_size,
        groups=_aspect_groups(records) if cfg.DATALOADER.ASPECT_RATIO_GROUPING else [0] * len(records),
        rank=comm.get_rank(),
        world_size=world_size,
    )
    # Serialised once, so that worker processes share them.
    shared = DatasetFromList(records, copy=False)
    mapper = build_mapper(cfg, is_train=True)
    if is_pasted_on(cfg):
        mapper = CopyPaste(mapper, shared, probability=cfg.INPUT.COPY_PASTE.PROBABILITY)
    return TrainLoader(SeededRecords(shared, mapper), batches, num_workers=cfg.DATALOADER.NUM_WORKERS)


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
    records = load_dataset(cfg, [dataset_name], train=False, open_images=True)
    return EvaluationLoader(records, build_mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS)


def build_mapper(cfg: CfgNode, *, is_train: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The mapper of a detector, or of a SemanticSegmentor."""
    return SemSegMapper(cfg, is_train=is_train) if is_segmentor(cfg) else Mapper(cfg, is_train=is_train)


def _check_task(cfg: CfgNode, names: list[str], records: list[dict[str, Any]]) -> None:
    if is_panoptic(cfg):
        _check_ignored(cfg)
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
    _check_ignored(cfg)


def _check_ignored(cfg: CfgNode) -> None:
    if cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE != IGNORED_LABEL:
        raise InputError(
            f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE}: it is {IGNORED_LABEL}"
        )


def _check_annotations(cfg: CfgNode, names: list[str], records: list[dict[str, Any]]) -> None:
    annotations = [annotation for record in records for annotation in record.get("annotations", ())]
    for annotation in annotations:
        box = annotation.get("bbox")
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(isinstance(n, (int, float)) for n in box):
            raise InputError(f"{_annotations(names)} has the bbox {box!r}: it is [left, top, width, height]")
    has_masks = any("segmentation" in annotation for annotation in annotations)
    if cfg.MODEL.MASK_ON and annotations and not has_masks:
        raise InputError(
            f"{_annotations(names)} has no segmentation to learn masks from, or to evaluate them by: add "
            "MODEL.MASK_ON False"
        )


def _check_images(names: Iterable[str], records: list[dict[str, Any]]) -> None:
    missing = list(missing_files(record["file_name"] for record in records))
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(records)} images of {', '.join(names)} are missing, the first is {missing[0]}"
        )


def _check_classes(cfg: CfgNode, name: str, first: str) -> None:
    stuff, key = MetadataCatalog.get(name).get("stuff_classes", ()), "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    if is_panoptic(cfg) and len(stuff) not in (0, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES):
        number = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
        raise InputError(f"{key} is {number}, and {name} has {len(stuff)} classes of stuff: add {key} {len(stuff)}")
    classes = class_names(cfg, name)
    if classes is None:
        return
    key, number = number_of_classes(cfg)
    if len(classes) != number:
        raise InputError(f"{key} is {number}, and {name} has {len(classes)} classes: add {key} {len(classes)}")
    if classes != class_names(cfg, first):
        raise InputError(f"{first} and {name} have other classes, or the same in another order: they cannot be mixed")


def class_names(cfg: CfgNode, name: str) -> list[str] | None:
    """Of a dataset, from the catalog or, before detectron2 has read a COCO file, from it; None where neither says."""
    metadata = MetadataCatalog.get(name)
    if is_segmentor(cfg):
        return metadata.get("stuff_classes")
    return metadata.get("thing_classes") or read_class_names(metadata.get("json_file"))


def _annotations(names: Iterable[str]) -> str:
    return ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names)
