"""Keys that have an effect with some values of another key only."""

import functools
from collections.abc import Sequence

from detectron2.config import CfgNode

from backbones.utils.errors import InputError

# The beginning of a key, the key that it depends on, and the values of that with which it is read.
_READ_WITH = (
    ("INPUT.MIN_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MAX_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MASK_FORMAT", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.PHOTOMETRIC_DISTORTION", "INPUT.AUGMENTATION", ("default", "lsj")),
    ("INPUT.LSJ.", "INPUT.AUGMENTATION", ("lsj", "strong")),
    ("INPUT.COPY_PASTE.", "INPUT.AUGMENTATION", ("strong",)),
    ("MODEL.EMA.DECAY", "MODEL.EMA.ENABLED", (True,)),
)


def check_typed_keys(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Whether the keys that were typed have an effect on training; those in files may be for other recipes.

    Args:
        overrides: keys and values by turns.

    Raises:
        InputError: for the first that has none.
    """
    for key in overrides[::2]:
        for beginning, other, values in _READ_WITH:
            value = functools.reduce(getattr, other.split("."), cfg)
            if key.startswith(beginning) and value not in values:
                raise InputError(
                    f"{key} has no effect with {other} {value}: leave it out, or add {other} "
                    f"{' or '.join(map(str, values))}"
                )
