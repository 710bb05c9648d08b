"""Train and evaluate detectors in one call, on COCO or on your own dataset."""

import contextlib
import dataclasses
import functools
import inspect
import json
import operator
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from backbones import ConfigError
from backbones.build import VARIANTS, get_variant
from backbones.checkpoint_files import read_checkpoint
from backbones.errors import GENERATOR, check_choice, check_replaceable, check_whole, closest, counted, first_of
from backbones.files import write_text
from projects_vil.checkpoint import CheckpointMetadata, find_model, weights_of
from projects_vil.config import (
    CONFIG_FILE,
    choose_device,
    combine_overrides,
    config_path,
    detector_name,
    head_of,
    load_config,
    merge_overrides,
    with_overrides,
)
from projects_vil.data.catalog import read_categories
from projects_vil.data.readers import SOURCE, Dataset, read_coco, read_dataset
from projects_vil.data.splits import find_copies, images_of
from projects_vil.engine import Trainer, check_output_dir, check_setup, check_values, saved_config
from projects_vil.engine.launch import Processes, launch, run_evaluation, run_training
from projects_vil.evaluation import EVALUATION_FILE, evaluate_predictions
from projects_vil.files import read_json
from projects_vil.inference import Detector
from projects_vil.modeling import TIMM_PREFIX, check_timm_name
from projects_vil.recipes import best_weights, chosen_size, default_model, with_recipe
from projects_vil.utils import cleanup_on_failure, run_lock
from vil.choices import DETECTORS, KEYS, NAMES_OF_OTHERS, RECIPES, SCHEDULES

# The result of detector_name -> the detector
_KINDS = {"RetinaNet": "retinanet", "Mask R-CNN": "mask_rcnn", "Faster R-CNN": "faster_rcnn"}
DATA_FOLDER = "data"
# In the folder of an evaluation: the path of its dataset
_SOURCE_FILE = "dataset.txt"
CLASSES = "classes"
# Config keys that do not change the results of an evaluation.
_SAME_RESULTS = {"DATALOADER.NUM_WORKERS", "MODEL.DEVICE", "OUTPUT_DIR"}
# Names of the datasets that this process has registered.
_registered: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        folder: Output directory of the run.
    """

    folder: Path

    def detector(self, **options: Any) -> Detector:
        """Return the detector of the best or last checkpoint, loaded with the options of :meth:`Detector.load`."""
        return Detector.load(self.folder, **options)

    @property
    def results(self) -> dict[str, Any]:
        """The results in ``evaluation.json``: dataset -> task -> metric in percent. Empty without an evaluation."""
        path = self.folder / EVALUATION_FILE
        return read_json(path) if path.is_file() else {}

    def __fspath__(self) -> str:
        """Return the output directory, so that other functions accept a run as a path."""
        return str(self.folder)


def train(
    data: str | Path | None = None,
    *,
    model: str | None = None,
    detector: str | None = None,
    schedule: str | None = None,
    config: str | Path | CfgNode | None = None,
    recipe: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    image_size: int | str | None = None,
    tiles: int | None = None,
    workers: int | None = None,
    images: str | Path | None = None,
    val_fraction: float | None = None,
    weights: str | os.PathLike | None = None,
    output: str | Path | None = None,
    device: int | str | torch.device | None = None,
    resume: bool = False,
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    dist_timeout: float = 600,
    **overrides: object,
) -> Run:
    """Train a detector and return its run. An argument that is None keeps the value of the config.

    Args:
        data: A folder or a file in COCO, YOLO, Pascal VOC, LabelMe, CVAT or VIA format. None uses the datasets of the
            config. Other formats are converted to COCO format in ``OUTPUT_DIR/data``.
        model: A variant, or ``"timm:NAME"`` for a model of timm. The default with ``data`` is
            ``"timm:tf_efficientnet_lite0"`` with ImageNet weights, a small ViL for random weights, or the model of
            ``weights`` from the model zoo. Without ``data`` it is ``"vil_tiny"``.
        detector: ``"retinanet"`` (default), ``"mask_rcnn"`` or ``"faster_rcnn"``.
        schedule: ``"1x"`` (default), or ``"3x_ms"`` for three times the iterations at several image sizes, as on COCO.
        config: A config instead of ``model`` and ``detector``: a file, a name such as
            ``"mask_rcnn/vil_small_rpb_1x"``, or a resolved config, which is used without the defaults of this function.
        recipe: Optimizer, schedule and augmentation: ``"finetune"`` (default with ``data`` and pretrained weights),
            ``"scratch"`` (default with ``data`` and random weights), or ``"paper"`` for the values of the config
            (default with ``config``, or without ``data``). See docs/training.md.
        epochs: Passes over the training images. The default with ``data`` depends on the recipe, the number of images
            and the device.
        batch: Images per iteration. The learning rate is scaled to it unless ``lr`` is given. The default is the batch
            size of the recipe, split by gradient accumulation if it does not fit into the memory.
        lr: Learning rate (``SOLVER.BASE_LR``).
        image_size: Shorter side of the training and test images in pixels; the longer side is at most 5/3 of it.
            ``"auto"`` is the smallest size at which the anchors match 98 % of the objects, and the default with
            ``data``, except for the recipe ``"paper"``.
        tiles: Side in pixels of tiles, for small objects in large images. The detector is trained on random crops of
            this size, and evaluates and predicts in overlapping tiles (``TEST.TILE_SIZE``).
        workers: Data loader processes (``DATALOADER.NUM_WORKERS``).
        images: The folder with the images, if it is not the folder of ``data``.
        val_fraction: Fraction of the images for validation if ``data`` has no validation images (default 0.2).
        weights: A checkpoint, a run's output directory, a name of the model zoo, or ``"none"`` for random weights. A
            run also sets the model, the detector and the anchors. With ``data``, the default is the best available
            weights of the model.
        output: Output directory (default ``output/DATA_MODEL_DETECTOR``).
        device: ``"cpu"``, ``"cuda"`` or the number of a GPU; by default the GPU if there is one. Training on a GPU uses
            mixed precision unless ``config`` is given or ``SOLVER.AMP.ENABLED`` is False.
        resume: Continue the interrupted run in ``output`` with its recipe and images. If ``output`` has no run,
            ``data``, ``model``, ``detector`` or ``config`` starts a new one, so that a job has the same command for
            each start.
        num_gpus: Processes on this machine, as for detectron2's ``launch``. New processes do not import your script. If
            it registers datasets or models, start it with ``torchrun`` instead.
        num_machines: As for detectron2's ``launch``.
        machine_rank: As for detectron2's ``launch``.
        dist_url: As for detectron2's ``launch``.
        dist_timeout: Seconds to wait for the other machines at the start. During the run, processes wait this long for
            each other, but at least 10 minutes.
        overrides: Config keys, for example ``overrides={"SOLVER.WEIGHT_DECAY": 0.1}``.

    Raises:
        ConfigError: For a mistake in the arguments, the data or a file.

    Example:
        >>> run = train("photos", epochs=10, output="out")
        >>> detections = run.detector()("holiday.jpg")
    """
    # -- the config keys that the user has set --
    if data is None and (images is not None or val_fraction is not None):
        raise ConfigError("Without data, images and val_fraction have no effect. Give data, or remove them.")
    given = _overrides_of(train, overrides)
    for argument, value in {"epochs": epochs, "batch": batch}.items():
        check_whole(argument, 1 if value is None else value)
    size, sizes = chosen_size(image_size, tiles)
    arguments = {"epochs": epochs, "batch": batch, "lr": None if lr is None else float(lr), "workers": workers}
    arguments |= {"output": output and os.fspath(output), "weights": weights and os.fspath(weights)}
    arguments |= {"device": None if device is None else str(device)}
    given = combine_overrides(given, {KEYS[name]: value for name, value in arguments.items()})
    if is_random := given.get("MODEL.WEIGHTS") in ("none", ""):
        given["MODEL.WEIGHTS"] = ""
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES)
    elif data is None or config is not None:
        recipe = "paper"
    # -- the config of the model, and the output directory --
    if model is not None and is_random:
        # timm would load the weights of the tag.
        model = model.partition(".")[0]
    trained = None
    if given.get("MODEL.WEIGHTS") and config is None:
        given["MODEL.WEIGHTS"], trained = _trained_detector(given["MODEL.WEIGHTS"], model, detector)
    if trained is not None:
        # Its heads need its architecture, its input, its image size and its anchors.
        base, name = _choose_config(trained.MODEL.TRANSFORMER.VARIANT, _KINDS[detector_name(trained)], schedule, None)
        head = head_of(base)
        values = {"MODEL": trained.MODEL, "MODEL.DEVICE": base.MODEL.DEVICE, "MODEL.WEIGHTS": ""}
        values |= {f"INPUT.{key}": trained.INPUT[key] for key in ("FORMAT", "MIN_SIZE_TEST", "MAX_SIZE_TEST")}
        base = with_overrides(base, values | {f"MODEL.{head}.NUM_CLASSES": base.MODEL[head].NUM_CLASSES})
    else:
        chosen = model
        if model is None and config is None and data is not None:
            chosen = default_model(given.get("MODEL.WEIGHTS", ""), is_random=is_random or recipe == "scratch")
        base, name = _choose_config(chosen, detector, schedule, config)
    folder = given.pop("OUTPUT_DIR", "")
    # The recipe may replace the sizes of the training images, but no key that the user has set.
    changes = combine_overrides(given, sizes)
    cfg = _with_given(base, changes)
    defaults: dict[str, object] = {}
    if isinstance(config, CfgNode):
        folder = folder or cfg.OUTPUT_DIR
    else:
        # More workers than cores are slower, and torch warns.
        defaults["DATALOADER.NUM_WORKERS"] = min(cfg.DATALOADER.NUM_WORKERS, os.cpu_count() or 1)
        if recipe == "paper" and "SOLVER.IMS_PER_BATCH" in given and "SOLVER.BASE_LR" not in given:
            defaults["SOLVER.REFERENCE_BATCH_SIZE"] = base.SOLVER.IMS_PER_BATCH
        if config is None and cfg.MODEL.DEVICE.startswith("cuda") and torch.cuda.is_available():
            defaults["SOLVER.AMP.ENABLED"] = True
    if "://" in str(folder):
        raise ConfigError(f"Cannot write to the URL '{folder}'. Use a local output directory.")
    output = Path(folder or f"output/{_name(data) + '_' if data else ''}{name}").expanduser()
    cfg = with_overrides(cfg, defaults | {"OUTPUT_DIR": str(output)}, keep=given)
    if {"SOLVER.EPOCHS", "SOLVER.MAX_ITER"} <= given.keys():
        raise ConfigError("epochs (SOLVER.EPOCHS) and SOLVER.MAX_ITER both set the length of training. Remove one.")
    if data is not None and _holds_data(output, Path(data)):
        raise ConfigError(f"--output '{output}' has files of the dataset. Choose another output directory.")
    # -- a resumed run keeps its data, its schedule and its classes --
    is_resumed = resume and saved_config(output) is not None
    if is_resumed and not isinstance(config, CfgNode):
        resumed = load_config(output / CONFIG_FILE)
        if schedule:
            raise ConfigError("A resumed run keeps its schedule. Remove schedule.")
        old, new = (f"{one.MODEL.TRANSFORMER.VARIANT} with {detector_name(one)}" for one in (resumed, cfg))
        if (model or detector or config) and old != new:
            raise ConfigError(f"The run in '{output}' trains {old}, not {new}. Omit --model, --detector and --config.")
        if data is not None:
            _check_same_data(data, images, val_fraction, resumed, output)
        data, cfg = None, with_overrides(_with_given(resumed, changes), {"OUTPUT_DIR": str(output)})
    elif resume and not (folder and (data or model or detector or config or "DATASETS.TRAIN" in given)):
        # A new run would train from the start. Without DATA, it would train the default model on COCO.
        runs = [path for path in output.parent.glob("*") if saved_config(path)]
        newest = f", such as '{max(runs, key=os.path.getmtime)}'" if runs else ""
        text = f"'{output}' has no run to resume. Give the output directory of a run with --output{newest}."
        raise ConfigError(f"{text} To start a new run, omit --resume.")
    elif resume and not is_resumed:
        print(f"warning: '{output}' has no run to resume, so a new run starts", flush=True)
    # Errors of the arguments come before the data, which may take long to read.
    if sizes and cfg.INPUT.AUGMENTATION != "default":
        raise ConfigError(f"image_size has no effect with {cfg.INPUT.AUGMENTATION} augmentation. Set INPUT.LSJ.SIZE.")
    check_values(cfg)
    cfg = choose_device(cfg, requested="MODEL.DEVICE" in given)
    processes = Processes(cfg.MODEL.DEVICE, num_gpus, num_machines, machine_rank, dist_url, dist_timeout)
    with cleanup_on_failure(output):
        dataset: Dataset | None = None
        options: dict[str, Any] = {"image_size": size, "num_processes": processes.world_size}
        # -- the dataset and the weights --
        with run_lock(output) if processes.is_first else contextlib.nullcontext():
            check_output_dir(cfg, resume=resume)
            if data is not None:
                dataset = read_dataset(data, output / DATA_FOLDER, val=val_fraction, images=images)
        if dataset is not None:
            print(dataset.line(), flush=True)
            number = dataset.sizes.get("val")
            if number and number < 20:
                print(f"    the AP of {counted(number, 'validation image')} is not reliable: add more", flush=True)
            if cfg.MODEL.MASK_ON and not dataset.has_masks:
                raise ConfigError(
                    f"Mask R-CNN needs masks, but '{data}' has only boxes. Use --detector faster_rcnn or retinanet."
                )
            values = _register(dataset, output.name) | {f"MODEL.{head_of(cfg)}.NUM_CLASSES": len(dataset.classes)}
            if config is None and "MODEL.WEIGHTS" not in given and recipe != "scratch":
                values["MODEL.WEIGHTS"] = best_weights(cfg)
            cfg = with_overrides(cfg, values, keep=given)
            if trained is not None:
                print(f"Weights: {cfg.MODEL.WEIGHTS}, with its model, image size and anchors", flush=True)
                options["keep_anchors"] = True
                options["low_rate"] = set(dataset.classes) <= set(_classes_of(cfg.MODEL.WEIGHTS) or ())
        # -- the recipe --
        if not (is_resumed or isinstance(config, CfgNode)):
            # Models of timm with a tag start from its weights.
            is_pretrained = cfg.MODEL.WEIGHTS or "." in cfg.MODEL.TRANSFORMER.VARIANT
            recipe = recipe or ("finetune" if is_pretrained else "scratch")
            cfg = with_recipe(cfg, recipe, dataset.contents["train"] if dataset else {}, given=set(given), **options)
        dataset = None  # frees its memory during the training
        check_setup(cfg, processes=processes.world_size, resume=resume, overridden=given)
        launch(functools.partial(run_training, cfg, Trainer, resume, tuple(given)), processes)
    return Run(output)


def evaluate(
    model: str | os.PathLike | CfgNode | None,
    data: str | Path | None = None,
    *,
    images: str | Path | None = None,
    predictions: Sequence[str | Path] = (),
    output: str | Path | None = None,
    resume: bool = False,
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    dist_timeout: float = 600,
    **overrides: object,
) -> dict[str, Any]:
    """Evaluate a detector and return dataset -> task -> metric in percent, as in its ``evaluation.json``.

    Args:
        model: Output directory of a run, name of the model zoo, checkpoint next to its ``config.yaml``, or a resolved
            config; None with ``predictions``.
        data: Dataset in a format of :func:`train`. Its test images are used, else its validation images, else all
            images. Test images without annotations are not used. Classes are matched by name, and some may be missing.
            None uses ``DATASETS.TEST`` of the config.
        images: The folder with the images, if it is not the folder of ``data``.
        predictions: Parquet files of ``vil predict``, or folders of them, to evaluate instead of a model.
        output: Folder for the results. The default is the output directory of the run. With ``data``, ``overrides`` or
            a checkpoint other than the last one, it is a folder in it, such as ``evaluation_DATA``,
            ``evaluation_overrides`` or ``evaluation_model_0000099``.
        resume: Evaluate the last checkpoint in the output directory of a resolved config.
        num_gpus: As for detectron2's ``launch``. With ``predictions``, processes on the CPU that share the images.
        num_machines: As for detectron2's ``launch``.
        machine_rank: As for detectron2's ``launch``.
        dist_url: As for detectron2's ``launch``.
        dist_timeout: Seconds to wait for the other machines at the start.
        overrides: Config keys.

    Raises:
        ConfigError: For a mistake in the arguments, the data or a file.

    Example:
        >>> results = evaluate("output/mine", data="more_photos")
    """
    if data is None and images is not None:
        raise ConfigError("Without data, images has no effect. Give data, or remove it.")
    given = combine_overrides(_overrides_of(evaluate, overrides), {"OUTPUT_DIR": output})
    # With another checkpoint or overrides, evaluation.json of the run keeps its results.
    changes: list[str] = []
    if isinstance(model, CfgNode):
        cfg, root = model, Path(model.OUTPUT_DIR)
    elif predictions:
        cfg, root = load_config(config_path("base/retinanet_1x")), Path("output")
    else:
        source = Path(model or "")
        path, weights = find_model(source, given.get("MODEL.WEIGHTS"))
        cfg, root = load_config(path), folder_of(path)
        if weights is not None:
            cfg = with_overrides(cfg, {"MODEL.WEIGHTS": str(weights)})
        if path.name == CONFIG_FILE and weights == source and weights_of(root) not in (source, None):
            changes.append(source.stem)
        if path.name == CONFIG_FILE and given.keys() - _SAME_RESULTS:
            changes.append("overrides")
    default = root / "_".join(["evaluation", *changes]) if changes else root
    default = default if data is None else _evaluation_folder(root, data, changes)
    folder = Path(given.pop("OUTPUT_DIR", None) or default).expanduser()
    cfg = with_overrides(merge_overrides(cfg, given), {"OUTPUT_DIR": str(folder)})
    if changes and folder == default:
        print(f"The results may differ from the results of the run, so they are written to '{folder}'.", flush=True)
    if not predictions:
        cfg = choose_device(cfg, requested="MODEL.DEVICE" in given)
    device = "cpu" if predictions else cfg.MODEL.DEVICE
    processes = Processes(device, num_gpus, num_machines, machine_rank, dist_url, dist_timeout)
    with cleanup_on_failure(folder):
        if data is not None:
            dataset = read_dataset(data, folder / DATA_FOLDER, val=0, images=images)
            write_text(folder / _SOURCE_FILE, os.path.realpath(data))
            present = [split for split in ("test", "val", "train") if split in dataset.splits]
            test = next((split for split in present if dataset.contents[split].get("annotations")), present[0])
            label, evaluated = ("all", "all images") if test == "train" else (test, f"split {test}")
            evaluated += f" (split {present[0]} has no annotations)" if test != present[0] else ""
            print(f"{dataset.line()}\nevaluated: {evaluated}; in the results it is '{folder.name}_{label}'", flush=True)
            _warn_of_training_images(cfg, (dataset.contents[test], *dataset.splits[test]))
            dataset.contents.clear()  # frees its memory
            # Classes are matched by name to the classes of the checkpoint, or else of its training dataset.
            labels = list((read_categories(str(dataset.splits[test][0])) or {}).values())
            classes = None if predictions else _write_classes(cfg.MODEL.WEIGHTS, folder / DATA_FOLDER, data, labels)
            splits = dataset.splits | {label: dataset.splits[test]} | ({CLASSES: (classes, folder)} if classes else {})
            dataset = dataclasses.replace(dataset, splits=splits)
            values = _register(dataset, folder.name, train=CLASSES if classes else "train", test=label)
            if classes is None and not predictions:
                del values["DATASETS.TRAIN"]
            cfg = with_overrides(cfg, values, keep=given)
        if predictions:
            launch(functools.partial(evaluate_predictions, cfg, predictions), processes)
        else:
            check_setup(cfg, processes=processes.world_size, eval_only=True, resume=resume)
            launch(functools.partial(run_evaluation, cfg, Trainer, resume), processes)
    return Run(folder).results


def _evaluation_folder(root: Path, data: str | Path, changes: Sequence[str]) -> Path:
    """Return the folder for the results on a dataset, with names of parent folders if another dataset has its name."""
    source, names, folder = os.path.realpath(data), [_name(data)], root
    for parent in Path(source).parents:
        folder = root / "_".join(["evaluation", *names, *changes])
        file = folder / _SOURCE_FILE
        # Other processes of this evaluation may have created the folder.
        if not (folder / EVALUATION_FILE).exists() or (file.is_file() and file.read_text() == source):
            break
        names.insert(0, parent.name)
    return folder


def _warn_of_training_images(cfg: CfgNode, part: tuple[dict[str, Any], Path, Path]) -> None:
    """Print a warning if images of a split are copies of training images: their AP does not measure new images."""
    for _, file, folder in [entry for entry in cfg.DATASETS.COCO if entry[0] in cfg.DATASETS.TRAIN]:
        # The files of the training may be gone or changed.
        with contextlib.suppress(ConfigError):
            copies = find_copies({"train": (read_coco(file), Path(file), Path(folder)), "val": part})
            if copied := [path for _, path in images_of(part[0], part[2]) if path in copies]:
                text = f"warning: {len(copied):,} of the evaluated images are copies of training images, such as "
                text += f"'{copied[0]}' of '{copies[copied[0]]}', which makes AP"
                print(f"{text} too high. Without DATA, the validation images of the run are used.", flush=True)


def _classes_of(weights: str) -> Sequence[str] | None:
    """Return the classes of a checkpoint, or None if they are unknown."""
    return CheckpointMetadata.from_contents(read_checkpoint(weights)).classes if os.path.isfile(weights) else None


def _write_classes(weights: str, folder: Path, data: str | Path, labels: Sequence[str]) -> Path | None:
    """Write the classes of a checkpoint as a COCO file without images. Return None if they are unknown.

    Raises:
        ConfigError: If ``labels``, the classes of ``data``, are not all classes of the checkpoint.
    """
    names = _classes_of(weights)
    if names is None:
        return None
    if unknown := [name for name in labels if name not in names]:
        text = f"'{data}' has classes that the model does not have: {first_of(list(map(repr, unknown)), 5)}"
        advice = f"Rename or remove them. The model has {first_of(names, 5)}."
        raise ConfigError(f"{text}{closest(unknown[0], names) or '.'} {advice}")
    path = folder / f"{CLASSES}.json"
    check_replaceable(path, advice="Choose another output directory.")
    categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    write_text(path, json.dumps({"info": {"description": GENERATOR}, "images": [], "categories": categories}))
    return path


def folder_of(config: Path) -> Path:
    """Return the folder for the results of a detector: its output directory, or ``output/NAME`` for another config."""
    return config.parent if config.name == CONFIG_FILE else Path("output", config.stem)


def _overrides_of(function: Callable, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys among keyword arguments and in the argument ``overrides``.

    Raises:
        ConfigError: For a keyword that is not a config key.
    """
    given = combine_overrides(overrides.pop("overrides", {}), overrides)
    for key in given:
        if "." not in key and not key.isupper():
            known, same = set(inspect.signature(function).parameters) - {"overrides"}, NAMES_OF_OTHERS.get(key)
            hint = f". Use {same!r}." if same and (same in known or same.isupper()) else closest(key, known)
            raise ConfigError(f"{function.__name__}() has no keyword {key!r}{hint or '.'} Config keys are in capitals.")
    return given


def _holds_data(output: Path, data: Path) -> bool:
    """Return whether an output directory is a dataset, or a folder inside a dataset that no run has written."""
    output, data = output.resolve(), data.resolve()
    is_used = output.is_dir() and any(output.iterdir()) and not (output / "log.txt").exists()
    return output == data or (is_used and data.is_dir() and output.is_relative_to(data))


def _with_given(cfg: CfgNode, given: Mapping[str, object]) -> CfgNode:
    """Merge the user's config keys. The last learning rate keeps its ratio to the learning rate."""
    merged, rates = merge_overrides(cfg, given), cfg.SOLVER
    if "SOLVER.BASE_LR_END" in given or not rates.BASE_LR_END:
        return merged
    return with_overrides(merged, {"SOLVER.BASE_LR_END": rates.BASE_LR_END / rates.BASE_LR * merged.SOLVER.BASE_LR})


def _check_same_data(
    data: str | Path, images: str | Path | None, val: float | None, resumed: CfgNode, output: Path
) -> None:
    """Raise a ConfigError if the dataset differs from the dataset with which the run in ``output`` started."""
    entries = {name: files for name, *files in resumed.DATASETS.COCO}
    names = [*resumed.DATASETS.TRAIN, *resumed.DATASETS.TEST]
    with tempfile.TemporaryDirectory() as folder:
        dataset = read_dataset(data, folder, val=val, images=images, extracted=output / DATA_FOLDER / "images")
    used = [split for split in ("train", "val") if split in dataset.splits]
    is_same = len(used) == len(names) and entries.keys() >= set(names)
    for name, split in zip(names, used, strict=True) if is_same else ():
        files = zip(entries[name], dataset.splits[split], strict=True)
        same_file, same_root = (os.path.realpath(old) == os.path.realpath(new) for old, new in files)
        same_content = same_file or _have_equal_records(dataset.contents[split], read_coco(entries[name][0]))
        is_same = is_same and same_root and same_content
    if is_same:
        return
    source = names[0]
    if source in entries:
        file, _ = entries[source]
        info = read_coco(file).get("info")
        # A converted file contains the path of its dataset.
        source = info.get(SOURCE, file) if isinstance(info, dict) else file
    changed = "(or --val-fraction) has changed since the start of the run in"
    differs = changed if source == os.path.abspath(data) else f"is not '{source}', the dataset of the run in"
    raise ConfigError(f"'{data}' {differs} '{output}'. Omit DATA, or choose another output directory.")


def _have_equal_records(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    lists = [(one.get(key, ()), other.get(key, ())) for key in ("images", "annotations", "categories")]
    return all(len(first) == len(second) and all(map(operator.eq, first, second)) for first, second in lists)


def _choose_config(
    model: str | None, detector: str | None, schedule: str | None, config: str | Path | CfgNode | None
) -> tuple[CfgNode, str]:
    """Return the config of a model, detector and schedule, and a name for the output directory.

    A variant without a config of its own has the base recipe of its family.
    """
    if config is not None and (model or detector or schedule):
        raise ConfigError("The config also sets model, detector and schedule. Remove config, or remove the others.")
    if isinstance(config, CfgNode):
        return config, ""
    if config is not None:
        return load_config(config), Path(config).stem
    model, detector = model or "vil_tiny", detector or "retinanet"
    own = model.removeprefix(TIMM_PREFIX)
    check_choice("detector", detector, DETECTORS)
    folder = "retinanet" if detector == "retinanet" else "mask_rcnn"
    schedule = schedule or SCHEDULES[0]
    check_choice("schedule", schedule, SCHEDULES)
    if model in DETECTORS or Path(model).suffix in (".pt", ".pth", ".onnx", ".safetensors", ".yaml"):
        raise ConfigError(f"'{model}' is not the name of a backbone. Give it as --detector, --weights or --config.")
    if model not in VARIANTS and timm.is_model(model):
        raise ConfigError(f"'{model}' is a model of timm. Write {TIMM_PREFIX}{model}.")
    # An unknown name raises an error.
    check_timm_name(model) if model.startswith(TIMM_PREFIX) else get_variant(model)
    family = f"{model[:3]}_" if model.startswith(("lit", "cvt")) else ""
    cfg = load_config(config_path(f"{folder}/{own}_{schedule}", f"base/{family}{folder}_{schedule}"))
    values = {"MODEL.TRANSFORMER.VARIANT": model} | ({"MODEL.MASK_ON": False} if detector == "faster_rcnn" else {})
    return with_overrides(cfg, values), f"{model}_{detector}".replace(":", "_")


def _trained_detector(weights: str, model: str | None, detector: str | None) -> tuple[str, CfgNode | None]:
    """Return a checkpoint, and the config of its detector.

    The config is None if the folder has no config of a detector with a backbone of this project, or if ``model`` or
    ``detector`` is another one.

    Args:
        weights: A checkpoint, a name of the model zoo, or the output directory of a run.
    """
    path = Path(weights).expanduser()
    if not (path.exists() and ((path if path.is_dir() else path.parent) / CONFIG_FILE).is_file()):
        return weights, None
    config, checkpoint = find_model(path)
    try:
        cfg = load_config(config)
    except ConfigError:
        # Other programs also write a file of this name.
        return str(checkpoint), None
    kind = _KINDS.get(detector_name(cfg))
    is_same = model in (None, cfg.MODEL.TRANSFORMER.VARIANT) and detector in (None, kind)
    is_own = kind and cfg.MODEL.BACKBONE.NAME.endswith("transformer_fpn_backbone") and not cfg.MODEL.KEYPOINT_ON
    return str(checkpoint), cfg if is_own and is_same else None


def _register(dataset: Dataset, name: str, *, train: str = "train", test: str = "val") -> dict[str, Any]:
    """Return the config keys of a dataset, and free the names of its splits, which an earlier run may have used."""
    entries = []
    for split, files in dataset.splits.items():
        own = f"{name}_{split}"
        if own in _registered:
            DatasetCatalog.pop(own, None)
            MetadataCatalog.pop(own, None)
        _registered.add(own)
        # The advice of errors names it.
        MetadataCatalog.get(own).source = str(dataset.source)
        entries.append([own, *map(os.path.abspath, files)])
    return {
        "DATASETS.COCO": entries,
        "DATASETS.TRAIN": (f"{name}_{train}",),
        "DATASETS.TEST": (f"{name}_{test}",) if test in dataset.splits else (),
    }


def _name(data: str | Path) -> str:
    """Return the name of a dataset, from its folder and the name of a COCO or CVAT file."""
    path = Path(data).resolve()
    if path.is_dir():
        return path.name
    folder = path.parents[path.parent.name == "annotations"].name
    return f"{folder}_{path.stem}" if path.suffix in (".json", ".xml") else folder
