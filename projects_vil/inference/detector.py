"""A trained detector that takes images, from wherever it was saved."""

import contextlib
import numbers
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from detectron2.config import CfgNode
from detectron2.structures import Instances

from backbones import InputError
from projects_vil.checkpoint import LAST_CHECKPOINT, Categories
from projects_vil.config import CONFIG_FILE, load_config
from projects_vil.data import register_datasets
from projects_vil.export import is_exported
from projects_vil.inference.detections import DRAWN_FROM, Detections
from projects_vil.inference.runners import ExportedRunner, Predictor, Runner, check_runner, exported_in
from projects_vil.inference.sharing import MANIFEST_FILE, WEIGHTS_FILE, Shared, check_saved, hint_at_hub
from projects_vil.inference.sources import (
    ImageArray,
    ImageFile,
    Images,
    ImageSource,
    Loaded,
    PillowImage,
    Skipped,
    Video,
    read_ahead,
)

FINAL_WEIGHTS = "model_final.pth"
READERS = 4  # threads that read files

ImageLike = str | os.PathLike | np.ndarray | PIL.Image.Image


class Detector(Shared):
    """A trained detector for images in files and in memory::

        detector = Detector.load("output/vil_tiny")
        found = detector("photo.jpg")
        found.boxes, found.scores, found.names

    **Arrays are RGB**, (H, W, 3) uint8, as Pillow and Matplotlib have them; OpenCV's are BGR: pass
    ``array[..., ::-1]``. Which order the model itself takes is no concern of the caller's.

    Images are resized as for testing. Only images of one resized size share a batch, so that every batch size gives the
    same answers, up to the rounding of floating-point sums.

    Args:
        runner: what detects; :meth:`load` and :meth:`build` make it.
        categories: other ids and names for its classes.
        drawn_from: the lowest score of what drawings show where they are told no other.

    Attributes:
        runner, categories: as above.
    """

    def __init__(self, runner: Runner, *, categories: Categories | None = None, drawn_from: float = DRAWN_FROM) -> None:
        self.runner = runner
        self.categories = categories or runner.categories
        self.drawn_from = drawn_from

    @classmethod
    def load(
        cls,
        source: str | os.PathLike,
        *,
        weights: str | os.PathLike | None = None,
        device: str | torch.device | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
        overrides: Sequence[object] = (),
    ) -> "Detector":
        """The detector that something was saved as.

        Args:
            source: a run's folder (``config.yaml`` and ``model_final.pth``, or else its last checkpoint), one that
                :meth:`save_pretrained` wrote, a config with ``MODEL.WEIGHTS`` (in a run's own these are what it began
                with), a checkpoint beside its ``config.yaml``, or an exported file, which needs no config.
            weights: a checkpoint other than that.
            device: ``"cpu"`` or ``"cuda"``; None for the GPU where there is one. Exported files run on the CPU.
            score_threshold: the lowest score of a detection, in [0, 1]; None for the config's or the exported file's.
            tta: whether to augment images at test time.
            overrides: keys and values of the config by turns, ``["INPUT.MIN_SIZE_TEST", 640]``.

        Raises:
            InputError: for what is missing or damaged, or does not fit together.
        """
        named, source = os.fspath(source), Path(source)
        if not source.exists():
            raise InputError(f"there is no file or folder {source}{hint_at_hub(named)}")
        _check_threshold(score_threshold)
        if source.is_file() and is_exported(source):
            if weights is not None or len(overrides) or tta:
                raise InputError(f"{source} is an exported model: it takes neither weights nor overrides nor tta")
            if device is not None and str(device) != "cpu":
                raise InputError(f"{source} is an exported model, which runs on the CPU here, not on {device}")
            return cls._of(ExportedRunner(source, score_threshold=score_threshold), score_threshold)
        check_saved(source if source.is_dir() else source.parent)
        said = dict(zip(overrides[::2], overrides[1::2], strict=False))
        config, weights = _find_model(source, weights or said.get("MODEL.WEIGHTS"))
        cfg = load_config(config, [str(value) for value in overrides])
        cfg.defrost()
        if device is not None or "MODEL.DEVICE" not in said:
            cfg.MODEL.DEVICE = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # For colours, and for the names of classes that an older checkpoint does not have: nothing depends on them.
        with contextlib.suppress(InputError):
            register_datasets(cfg)
        return cls.build(cfg, weights or cfg.MODEL.WEIGHTS, tta=tta, score_threshold=score_threshold)

    @classmethod
    def build(
        cls,
        cfg: CfgNode,
        weights: str | os.PathLike,
        *,
        tta: bool = False,
        score_threshold: float | None = None,
    ) -> "Detector":
        """The detector of a config, on its ``MODEL.DEVICE``, with the weights of a file; or an exported file.

        Raises:
            InputError: as :meth:`load`.
        """
        _check_threshold(score_threshold)
        check_runner(cfg, weights, tta=tta)
        if is_exported(weights):
            runner = ExportedRunner(weights, score_threshold=score_threshold, datasets=cfg.DATASETS.TEST)
            return cls._of(runner, score_threshold)
        if score_threshold is not None:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.MODEL.RETINANET.SCORE_THRESH_TEST = cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = float(score_threshold)
        return cls._of(Predictor(cfg, weights, tta=tta), score_threshold)

    @classmethod
    def _of(cls, runner: Runner, score_threshold: float | None) -> "Detector":
        return cls(runner, drawn_from=DRAWN_FROM if score_threshold is None else score_threshold)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes."""
        return self.categories.names

    def __call__(
        self, images: ImageLike | Sequence[ImageLike], *, batch_size: int = 1
    ) -> Detections | list[Detections]:
        """What is in an image, or in each of a list, in its order.

        Args:
            images: file names, arrays **(H, W, 3) uint8 RGB**, or Pillow's images: one, or a list or tuple of any.
            batch_size: images at once, at most.

        Raises:
            InputError: for the first that is of another kind, cannot be read, or is too small or large for the model.
        """
        _check_batch_size(batch_size)
        one = not isinstance(images, (list, tuple))
        listed = [images] if one else images
        sources = [
            _image_source(image, "the image" if one else f"image {place + 1} of {len(listed)}", place)
            for place, image in enumerate(listed)
        ]
        found = {}
        threads = max(min(READERS, len(sources)), 1)
        for batch in self.detect(Images(sources, threads=threads), batch_size=batch_size):
            for item, detections in batch:
                if isinstance(item, Skipped):
                    raise InputError(f"cannot take {item.name}: {item.reason}")
                found[item.index] = detections
        results = [found[index] for index in range(len(sources))]
        return results[0] if one else results

    def detect(
        self, source: Images | Video, *, batch_size: int = 1, keep_pixels: bool = False
    ) -> Iterator[list[tuple[Loaded, Detections] | tuple[Skipped, None]]]:
        """What is in each image of a source, in batches, while the next are read; those of one size come together.

        Args:
            source: images or a video.
            batch_size: images at once, at most.
            keep_pixels: whether every image is to be drawn, so that no file is read twice.
        """
        with (
            contextlib.closing(source.batches(self.runner, batch_size, keep_pixels=keep_pixels)) as batches,
            contextlib.closing(read_ahead(batches)) as batches_ahead,
        ):
            for batch in batches_ahead:
                skipped = [(item, None) for item in batch if isinstance(item, Skipped)]
                found = self._run([item for item in batch if isinstance(item, Loaded)])
                yield skipped + [(loaded, self._detections(instances, loaded)) for loaded, instances in found]

    def _run(self, batch: list[Loaded]) -> Iterator[tuple[Loaded, Instances]]:
        # One group, but for files whose header told another size than their pixels.
        groups = defaultdict(list)
        for loaded in batch:
            groups[loaded.image.shape].append(loaded)
        for group in groups.values():
            sizes = [(loaded.entry["height"], loaded.entry["width"]) for loaded in group]
            yield from zip(group, self.runner([loaded.image for loaded in group], sizes), strict=True)

    def _detections(self, instances: Instances, loaded: Loaded) -> Detections:
        return Detections(instances, self.categories, loaded.source, drawn_from=self.drawn_from)


def _find_model(source: Path, weights: str | os.PathLike | None) -> tuple[Path, str | os.PathLike | None]:
    """The config that a source means, and the weights: those that are given or its own; None if the config has them."""
    if source.is_dir():
        config = source / CONFIG_FILE
        if not config.is_file():
            exported = exported_in(source)
            hint = f"; it holds {exported[0]}, which can be loaded by itself" if exported else ""
            raise InputError(f"{source} has no {CONFIG_FILE}: it is no folder of a run{hint}")
        return config, weights or _weights_in(source)
    if source.suffix in (".yaml", ".yml"):
        run = source.parent
        if source.name == CONFIG_FILE and weights is None:
            if (run / LAST_CHECKPOINT).is_file():
                # Those could load without a word, and are not what was trained.
                raise InputError(f"MODEL.WEIGHTS of {source} are those that its run began with: load the folder {run}")
            if (run / MANIFEST_FILE).is_file():
                return source, run / WEIGHTS_FILE
        return source, weights
    config = source.parent / CONFIG_FILE
    if not config.is_file():
        exported = exported_in(source)
        hint = f"; {exported[0]} can be loaded by itself" if exported else ""
        raise InputError(
            f"there is no {CONFIG_FILE} beside {source}: load a config, with weights={str(source)!r}{hint}"
        )
    return config, weights or source


def _weights_in(run: Path) -> Path:
    last = run / LAST_CHECKPOINT
    named = [FINAL_WEIGHTS, last.read_text().strip() if last.is_file() else ""]
    newest = sorted((path.name for path in run.glob("model_*.pth")), reverse=True)
    for name in (*named, *newest, WEIGHTS_FILE):
        if name and (run / name).is_file():
            return run / name
    raise InputError(f"{run} has no weights: neither {FINAL_WEIGHTS} nor another checkpoint, model_*.pth")


def _image_source(image: object, name: str, place: int) -> ImageSource:
    if isinstance(image, (str, os.PathLike)):
        return ImageFile(Path(image), str(image) if name == "the image" else f"{name}, {image}", place)
    if isinstance(image, PIL.Image.Image):
        return PillowImage(image, name, place)
    if not isinstance(image, np.ndarray):
        kinds = "a file name, an array (H, W, 3) uint8 RGB or a PIL image is needed"
        hint = ": tensor.permute(1, 2, 0).cpu().numpy(), say" if isinstance(image, torch.Tensor) else ""
        raise InputError(f"{name} is of type {type(image).__name__}, and {kinds}{hint}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        hint = "; pass several as a list" if image.ndim == 4 else ""
        hint = "; channels come last" if image.ndim == 3 and image.shape[0] == 3 != image.shape[2] else hint
        raise InputError(f"{name} is an array {image.shape} {image.dtype}, and (H, W, 3) uint8 RGB is needed{hint}")
    return ImageArray(image, name, place)


def _check_threshold(score_threshold: float | None) -> None:
    if score_threshold is not None and not (isinstance(score_threshold, numbers.Real) and 0 <= score_threshold <= 1):
        raise InputError(f"score_threshold is {score_threshold!r}: it is 0 to 1")


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}: it is 1 or more")
