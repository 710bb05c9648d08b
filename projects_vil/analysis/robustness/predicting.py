"""Images in batches through a classifier."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL.Image import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from backbones import InputError
from projects_vil.analysis.robustness.scoring import top_classes
from projects_vil.analysis.robustness.sets import LabelledFolder
from projects_vil.checkpoint import LoadedClassifier
from projects_vil.data import UnreadableImage, read_unturned

# Seconds between two lines of progress in the log.
_EVERY = 30
_logger = logging.getLogger(__name__)


class Predictor:
    """Predictions of a classifier for folders of images; those of a folder that two sets share are made once.

    Args:
        classifier: its model is moved to ``device``.
        crop_pct: the share of the shorter side that the crop has; None for what the classifier's file says, or else its
            variant's.
        batch_size: images at once.
        num_workers: processes that read images; 0 for this one.
        device: of torch.

    Attributes:
        data_config: timm's, by which images are prepared: resized to ``input_size / crop_pct`` by the shorter side,
            and cropped to ``input_size``.
    """

    def __init__(
        self,
        classifier: LoadedClassifier,
        *,
        crop_pct: float | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._model = classifier.model.to(self._device)
        given = {**classifier.preparation, "input_size": (3, *classifier.img_size)}
        given |= {} if crop_pct is None else {"crop_pct": crop_pct}
        self.data_config = resolve_model_data_config(self._model, args=given)
        self._batch_size, self._num_workers = batch_size, num_workers
        self._last: tuple[LabelledFolder, tuple[Tensor, list[Path], list[int]]] | None = None

    def __call__(
        self, folder: LabelledFolder, title: str, *, cropped: bool = True
    ) -> tuple[Tensor, list[Path], list[int]]:
        """For a folder: predictions (N, 5), the images, and the number of the class that each lies in.

        Args:
            folder: of images.
            title: of the folder, for the log.
            cropped: False for images that are crops already: all of them is seen, resized.

        Raises:
            InputError: for a broken image, or outputs that are not finite.
        """
        if self._last is None or self._last[0] != folder:
            paths, classes = folder.images()
            self._last = folder, (self._predict(paths, folder.subset, title, cropped), paths, classes)
        return self._last[1]

    @torch.inference_mode()
    def _predict(self, paths: Sequence[Path], subset: Sequence[int] | None, title: str, cropped: bool) -> Tensor:
        config = self.data_config if cropped else self.data_config | {"crop_pct": 1.0}
        loader = DataLoader(
            _Images(paths, create_transform(**config, is_training=False)),
            batch_size=self._batch_size,
            num_workers=min(self._num_workers, len(paths)),
            pin_memory=self._device.type == "cuda",
        )
        begun = told = time.monotonic()
        found, done = [], 0
        for images in loader:
            logits = self._model(images.to(self._device, non_blocking=True)).float()
            if not logits.isfinite().all():
                raise InputError(f"{title}: the classifier's outputs are not finite: its weights are of no use")
            found.append(top_classes(logits, subset).cpu())
            done += len(images)
            if time.monotonic() - told > _EVERY:
                told = time.monotonic()
                _logger.info("%s: %d of %d images, %.1f a second", title, done, len(paths), done / (told - begun))
        return torch.cat(found)


class _Images(Dataset):
    """Image files, prepared."""

    def __init__(self, paths: Sequence[Path], transform: Callable[[Image], Tensor]) -> None:
        self._paths, self._transform = paths, transform

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Tensor:
        try:
            return self._transform(read_unturned(self._paths[index]))
        except UnreadableImage as error:
            # Whatever a worker raises is made again from its message alone.
            raise InputError(str(error)) from error
