"""Load the records of datasets, check them against the config, and build the data loaders."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from detectron2.data.build import filter_images_with_only_crowd_annotations, print_instances_class_histogram
from detectron2.data.samplers import RandomSubsetTrainingSampler, RepeatFactorTrainingSampler, TrainingSampler
from detectron2.utils import comm

from backbones import ConfigError
from backbones.errors import check_choice, closest
from projects_vil.config import first_of, is_panoptic, is_segmentor, number_of_classes
from projects_vil.data.augmentation import CopyPaste
from projects_vil.data.catalog import add_stuff, check_files, match_classes, read_categories
from projects_vil.data.coco import CHECK_MODES, fixed_coco, fixed_key, is_coco, load_coco, state_of_files
from projects_vil.data.dataset_mapper import Mapper
from projects_vil.data.detection_utils import IGNORED_LABEL, missing_files
from projects_vil.data.samplers import BatchStream, EvaluationLoader, SeededRecords, TrainLoader, serialized
from projects_vil.data.shared_records import SHARED, read_and_share
from projects_vil.utils import paused_garbage_collection

TRAIN_SAMPLERS = ("TrainingSampler", "RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")
# The memory limit of a container, in versions 2 and 1 of Linux control groups
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The metadata that detectron2 sets when it loads records.
_CLASS_KEYS = ("thing_classes", "thing_dataset_id_to_contiguous_id")


@paused_garbage_collection()
def load_dataset(cfg: CfgNode, names: Iterable[str], *, train: bool) -> Sequence[dict[str, Any]]:
    """Return the records of datasets in detectron2's dataset format.

    COCO files are checked and fixed according to ``DATASETS.CHECK`` (:func:`~projects_vil.data.coco.fixed_coco`).
    Each process logs each finding once. Records that :func:`read_datasets` has read are not read again.

    Args:
        cfg: The config of the run.
        names: Names of registered datasets.
        train: Whether the records are for training. Training skips images without objects unless
            ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` is False.

    Raises:
        ConfigError: If a name is unknown, a file is missing, annotations cannot be read, the dataset check finds
            errors, the annotations do not fit the task or the classes of the model, or no image is left.
    """
    names = list(names)
    check_choice("DATASETS.CHECK", cfg.DATASETS.CHECK, CHECK_MODES)
    if not names:
        raise ConfigError(f"DATASETS.{'TRAIN' if train else 'TEST'} is empty. Name a dataset.")
    for name in names:
        check_files(name)
    if (records := SHARED.get(_key(cfg, names, train))) is not None:
        return records
    files, records = ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names), []
    try:
        for name in names:
            if cfg.DATASETS.CHECK == "off" or not is_coco(name):
                own = DatasetCatalog.get(name)
            else:
                own = load_coco(name, check=cfg.DATASETS.CHECK, masks=cfg.MODEL.MASK_ON)
            order = class_order(cfg, name)
            own = in_order(own, order) if train and order is not None else own
            records += add_stuff(name, own) if is_panoptic(cfg) else own
        if train and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS and records and "annotations" in records[0]:
            records = filter_images_with_only_crowd_annotations(records)
    except ConfigError:
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"Cannot read '{files}' ({type(error).__name__} {error}). Repair the file.") from error
    if not records:
        raise ConfigError(f"'{files}' has no images{' with annotations' if train else ''}. Use another dataset.")
    _check_task(cfg, files, records)
    is_checked = cfg.DATASETS.CHECK != "off" and all(map(is_coco, names))
    if not is_checked and (missing := missing_files(record["file_name"] for record in records)):
        raise ConfigError(f"{len(missing)} images of '{files}' are missing, such as '{missing[0]}'. Add them.")
    if train and not is_segmentor(cfg):
        _check_memory(cfg, records)
        print_instances_class_histogram(records, model_classes(cfg)[1] or class_names(cfg, names[0]))
    return records


def read_datasets(cfg: CfgNode, *, train: bool = True) -> int:
    """Read and check the datasets of a run in the first process of each machine, and share them with its processes.

    All processes call this function before the run writes files. :func:`load_dataset`, the loaders, the evaluators and
    the visualization then use the shared records. Each file is read and checked once per machine, and its records are
    in memory once per machine.

    Args:
        cfg: The config of the run.
        train: Whether to read ``DATASETS.TRAIN`` in addition to ``DATASETS.TEST``.

    Returns:
        The number of training images, which ``SOLVER.EPOCHS`` uses. 0 if ``train`` is False.

    Raises:
        ConfigError: In all processes, under the conditions of :func:`load_dataset`.
    """
    SHARED.clear()
    for name in cfg.DATASETS.TEST:
        read_records(cfg, [name], train=False)
    number = read_records(cfg, cfg.DATASETS.TRAIN, train=True) if train else 0
    # The classes of the model come from the training dataset, and they may change when it is read.
    for name in cfg.DATASETS.TEST:
        class_order(cfg, name)
    return number


def read_records(cfg: CfgNode, names: Sequence[str], *, train: bool) -> int:
    """Run :func:`load_dataset` in the first process of each machine, and share the records. All processes call this.

    Returns:
        The number of images.
    """

    keys = list(itertools.product(names, _CLASS_KEYS))

    def read() -> tuple[int, list[Any]]:
        options = {"check": cfg.DATASETS.CHECK, "masks": cfg.MODEL.MASK_ON}
        # An evaluation needs the annotations of COCO files, too.
        for name in filter(is_coco, () if train or cfg.DATASETS.CHECK == "off" else names):
            SHARED[fixed_key(name, **options)] = serialized([fixed_coco(name, **options)])
        SHARED[_key(cfg, names, train)] = records = serialized(load_dataset(cfg, names, train=train))
        return len(records), [MetadataCatalog.get(name).get(key) for name, key in keys]

    number, values = read_and_share(read)
    for (name, key), value in zip(keys, values, strict=True):
        if value is not None:
            setattr(MetadataCatalog.get(name), key, value)
    return number


def _key(cfg: CfgNode, names: Sequence[str], train: bool) -> tuple:
    """Return the cache key of records: everything that they depend on."""
    keys = cfg.DATASETS.dump(), cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, cfg.MODEL.dump()
    return "records", tuple(names), train, *keys, *map(state_of_files, names)


def build_train_loader(cfg: CfgNode) -> TrainLoader:
    """Build a loader of ``DATASETS.TRAIN`` that samples and groups images like detectron2's training loader.

    The images of a batch and their augmentation depend only on the seed and the iteration. They do not depend on the
    number of worker processes (:class:`~projects_vil.data.samplers.TrainLoader`).

    Raises:
        ConfigError: If ``DATALOADER.SAMPLER_TRAIN`` is unknown, and under the conditions of :func:`load_dataset`.
    """
    records = serialized(load_dataset(cfg, cfg.DATASETS.TRAIN, train=True))
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, TRAIN_SAMPLERS)
    mapper = Mapper(cfg, is_train=True)
    if cfg.INPUT.AUGMENTATION == "lsj_copy_paste":
        mapper = CopyPaste(mapper, records, probability=cfg.INPUT.COPY_PASTE.PROBABILITY)
    return make_train_loader(
        records,
        mapper=mapper,
        total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        aspect_ratio_grouping=cfg.DATALOADER.ASPECT_RATIO_GROUPING,
        make_sampler=_sampler(cfg, records),
    )


def make_train_loader(
    dataset: Sequence[dict[str, Any]],
    *,
    mapper: Callable[[dict[str, Any]], dict[str, Any]],
    total_batch_size: int,
    num_workers: int = 0,
    aspect_ratio_grouping: bool = True,
    make_sampler: Callable[[int], torch.utils.data.Sampler[int]] | None = None,
) -> TrainLoader:
    """Build a training loader from records and a mapper, like detectron2's ``build_detection_train_loader``.

    Args:
        dataset: The records in detectron2's dataset format.
        mapper: Maps a record to an input of the model.
        total_batch_size: The number of images per iteration over all processes.
        num_workers: The number of worker processes per training process.
        aspect_ratio_grouping: Whether landscape and portrait images are in different batches.
        make_sampler: Returns the sampler for a seed. The default is detectron2's ``TrainingSampler``.
    """
    records = serialized(dataset)
    groups = [0] * len(records)
    if aspect_ratio_grouping:
        groups = [0 if record.get("width", 0) > record.get("height", 0) else 1 for record in records]
    make_sampler = make_sampler or (lambda seed: TrainingSampler(len(records), seed=seed))
    batches = BatchStream(make_sampler, batch_size=total_batch_size // comm.get_world_size(), groups=groups)
    return TrainLoader(SeededRecords(records, mapper), batch_sampler=batches, num_workers=num_workers)


def _sampler(cfg: CfgNode, records: DatasetFromList) -> Callable[[int], torch.utils.data.Sampler[int]]:
    """Return a function that maps a seed to detectron2's sampler ``DATALOADER.SAMPLER_TRAIN``."""
    name, size = cfg.DATALOADER.SAMPLER_TRAIN, len(records)
    if name == "RepeatFactorTrainingSampler":
        threshold = cfg.DATALOADER.REPEAT_THRESHOLD
        factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(records, threshold)
        return lambda seed: RepeatFactorTrainingSampler(factors, seed=seed)
    if name == "RandomSubsetTrainingSampler":
        ratio = cfg.DATALOADER.RANDOM_SUBSET_RATIO
        return lambda seed: RandomSubsetTrainingSampler(size, ratio, seed_shuffle=seed, seed_subset=seed)
    return lambda seed: TrainingSampler(size, seed=seed)


def build_test_loader(cfg: CfgNode, dataset_name: str) -> EvaluationLoader:
    """Build an evaluation loader of one dataset with one image per batch."""
    records = load_dataset(cfg, [dataset_name], train=False)
    return EvaluationLoader(records, Mapper(cfg, is_train=False), num_workers=cfg.DATALOADER.NUM_WORKERS)


def _check_task(cfg: CfgNode, files: str, records: list[dict[str, Any]]) -> None:
    """Raise a :class:`ConfigError` if the records lack the annotations that the model needs."""
    ignored = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
    if (is_segmentor(cfg) or is_panoptic(cfg)) and ignored != IGNORED_LABEL:
        raise ConfigError(f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {ignored}. Set it to {IGNORED_LABEL}.")
    if is_segmentor(cfg):
        if not all("sem_seg_file_name" in record for record in records):
            raise ConfigError(f"A SemanticSegmentor needs label images, but '{files}' has none. Use DATASETS.ADE20K.")
        return
    if any("annotations" not in record and "sem_seg_file_name" in record for record in records):
        architecture = cfg.MODEL.META_ARCHITECTURE
        raise ConfigError(f"A {architecture} needs boxes, but '{files}' has none. Use DATASETS.COCO.")
    objects = (entry for record in records for entry in record.get("annotations", ()))
    has_masks = ["segmentation" in entry for entry in objects] if cfg.MODEL.MASK_ON else []
    if has_masks and not any(has_masks):
        raise ConfigError(f"MODEL.MASK_ON is True, but '{files}' has no masks. Set MODEL.MASK_ON False.")


def _check_memory(cfg: CfgNode, records: list[dict[str, Any]]) -> None:
    """Raise a :class:`ConfigError` if an image has too many objects for the memory.

    Without this check, the operating system would kill the run in the first iteration.
    """
    record = max(records, key=lambda record: len(record.get("annotations", ())))
    number, memory = len(record.get("annotations", ())), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in filter(os.path.isfile, _MEMORY_LIMITS):
        limit = Path(path).read_text(encoding="utf-8").strip()
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    # Mask R-CNN has one anchor for 4 pixels, and RetinaNet has fewer. If they do not fit on the GPU, detectron2 matches
    # them on the CPU. Its pairwise_iou needs 24 bytes per object and anchor.
    needed = 24 * number * max(cfg.INPUT.MIN_SIZE_TRAIN) * cfg.INPUT.MAX_SIZE_TRAIN // 4
    if needed > memory:
        raise ConfigError(
            f"'{record['file_name']}' has {number:,} objects. Training on it needs about {needed / 1e9:.0f} GB, but "
            f"there are {memory / 1e9:.0f} GB. Divide the image into tiles, or lower INPUT.MAX_SIZE_TRAIN."
        )


def model_classes(cfg: CfgNode) -> tuple[str | None, list[str] | None]:
    """Return the name of the reference dataset, and its class names in the order of the model's outputs.

    The reference dataset is the first dataset of ``DATASETS.TRAIN`` and ``DATASETS.TEST``, in this order, that has the
    model's number of classes. Both values are None if there is no such dataset.
    """
    names, (_, number) = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST), number_of_classes(cfg)
    for name in names:
        classes = class_names(cfg, name) if name in MetadataCatalog.list() else None
        if classes and len(classes) == number:
            return name, classes
    return None, None


def class_order(cfg: CfgNode, name: str) -> list[int] | None:
    """Match the classes of a dataset to the classes of the model by name.

    A test dataset may lack classes of the model. Label images must have the same classes as the model, in the same
    order.

    Returns:
        The index in the model of each class of the dataset. None if both have the same classes in the same order, or if
        the class names are unknown.

    Raises:
        ConfigError: If the model lacks a class of the dataset, or if a training dataset has too few classes.
    """
    stuff, key = MetadataCatalog.get(name).get("stuff_classes", ()), "MODEL.SEM_SEG_HEAD.NUM_CLASSES"
    if is_panoptic(cfg) and len(stuff) not in (0, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES):
        number = cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
        raise ConfigError(f"{key} is {number}, but {name!r} has {len(stuff)} stuff classes. Set {key} {len(stuff)}.")
    classes, (reference, ours) = class_names(cfg, name), model_classes(cfg)
    if classes is None:
        return None
    key, number = number_of_classes(cfg)
    if len(classes) != number and (ours is None or name in cfg.DATASETS.TRAIN or is_segmentor(cfg)):
        raise ConfigError(f"{key} is {number}, but {name!r} has {len(classes)} classes. Set {key} {len(classes)}.")
    if ours is None:
        reference, ours = name, classes
    theirs = MetadataCatalog.get(reference).get("stuff_classes", ())
    if (is_panoptic(cfg) and stuff and theirs and stuff != theirs) or (is_segmentor(cfg) and classes != ours):
        raise ConfigError(f"The label images of {name!r} and {reference!r} have different classes. Use the same list.")
    if classes == ours:
        return None
    matched = match_classes(classes, ours)
    unknown = [label for index, label in enumerate(classes) if index not in matched]
    if unknown:
        text = first_of([repr(label) for label in unknown], 5)
        raise ConfigError(
            f"{name!r} has classes that do not exist in {reference!r}, whose classes the model uses: {text}"
            f"{closest(unknown[0], ours) or '.'} Rename or remove them."
        )
    return [matched[index] for index in range(len(classes))]


def in_order(records: Iterable[dict[str, Any]], order: Sequence[int]) -> list[dict[str, Any]]:
    """Return records with the class indices of the model; ``order`` is the result of :func:`class_order`."""
    return [
        record | {"annotations": [a | {"category_id": order[a["category_id"]]} for a in record.get("annotations", ())]}
        for record in records
    ]


def class_names(cfg: CfgNode, name: str) -> list[str] | None:
    """Return the class names of a dataset from its metadata or its COCO file, or None if they are unknown."""
    metadata = MetadataCatalog.get(name)
    if is_segmentor(cfg):
        return metadata.get("stuff_classes")
    known = metadata.get("thing_classes")
    return known or [label for _, label in read_categories(metadata.get("json_file")) or ()] or None
