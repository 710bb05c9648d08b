"""Classifiers of ``timm.create_model``, one of each family, and what timm's users read of them."""

import copy
import functools

import pytest
import timm
import torch
from timm.models import FeatureInfo
from torch import Tensor, nn

import backbones.timm_models  # noqa: F401  registers the names
from tests.backbones.helpers import random_images, randomise
from tests.selection import slow_except

SMALL = "vil_tiny_1_1_3_1"
RELATIVE = "vil_tiny_1_1_3_1_rpb"
FAMILIES = [SMALL, RELATIVE, "performer_tiny", "linformer_tiny", "ls_tiny", "cvt_ls_13", "lit_ti", "lit_s"]
FAMILIES += ["lit_s_seg", "global_tiny", "sra32_tiny"]
# The narrow ones, whose weights are drawn in no time
FAST = [SMALL, RELATIVE]
SIZE = (64, 96)
every_family = pytest.mark.parametrize("name", slow_except(FAMILIES, FAST))
every_flexible_family = pytest.mark.parametrize(
    "name", slow_except([name for name in FAMILIES if not name.startswith("linformer")], FAST)
)


@functools.cache
def _made(name: str, **options) -> nn.Module:
    return randomise(timm.create_model(name, **options)).eval()


def classifier(name: str, *, img_size: int | tuple[int, int] = SIZE, num_classes: int = 4, **options) -> nn.Module:
    """A model of one's own, with random weights that are the same in each; made once, since drawing takes its time."""
    return copy.deepcopy(_made(name, img_size=img_size, num_classes=num_classes, **options))


def images(*size: int, batch: int = 2) -> Tensor:
    return random_images(batch, 3, *(size or SIZE), dtype=torch.float32)


def assert_maps_are_as_told(maps: list[Tensor], info: FeatureInfo, size: tuple[int, int]) -> None:
    """As many as there are, of the channels and strides that timm's users read."""
    wanted = [(c, *(-(-side // r) for side in size)) for c, r in zip(info.channels(), info.reduction(), strict=True)]
    assert [tuple(m.shape[1:]) for m in maps] == wanted
    assert all(m.isfinite().all() for m in maps)
