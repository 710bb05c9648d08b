"""Other people's warnings that no user of this project can act on, each by its text, and why.

They are silenced once :mod:`projects_vil` is imported, before detectron2 is. Any other warning is shown.
"""

import logging
import re
import warnings

# The beginning of a warning, as a regular expression, and its category.
_WARNINGS = (
    # detectron2 scripts a few of its functions when it is imported.
    (r"`torch\.jit\.script` is deprecated", FutureWarning),
    (r"`torch\.jit\.script` is deprecated", DeprecationWarning),
    # The format, and how it is read.
    (r"`torch\.jit\.(load|save)` is deprecated", FutureWarning),
    (r"`torch\.jit\.(load|save)` is deprecated", DeprecationWarning),
    # detectron2's anchors; the order that it relies on is the default.
    (r"torch\.meshgrid: in an upcoming release", UserWarning),
    # detectron2's name for it, of several processes.
    (r"`broadcast_buffers` is deprecated", FutureWarning),
    # detectron2's model zoo; setup.py holds setuptools below the version that has dropped it.
    (r"pkg_resources is deprecated as an API", UserWarning),
)
# Loggers, and what their records say.
_RECORDS = (
    # detectron2's report of the environment looks for a compiler.
    ("torch.utils.cpp_extension", r"No CUDA runtime is found"),
    # Users' configs are read safely: this is one of detectron2's own, trusted as its code is.
    ("fvcore.common.config", r".*/detectron2/model_zoo/.*yaml\.unsafe_load"),
    # detectron2 asks torch whether it is recorded, in every Mask R-CNN.
    ("torch.fx._symbolic_trace", r"is_fx_tracing will return true"),
    # That is what a config without VERSION should be.
    ("detectron2.config.compat", r"Config '.*' has no VERSION\. Assuming it to be compatible"),
)


def silence_known_warnings() -> None:
    """Leave out what is listed above; a second call changes nothing."""
    for text, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=text, category=category)
    for name, text in _RECORDS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Unless) and known.pattern.pattern == text for known in logger.filters):
            logger.addFilter(_Unless(text))
    logging.getLogger("detectron2").addFilter(_explain_operators)


class _Unless(logging.Filter):
    """Lets records pass that do not begin with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pattern = re.compile(text, re.DOTALL)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None


def _explain_operators(record: logging.LogRecord) -> bool:
    """What detectron2 calls built wrongly was left out on purpose: nothing here needs its compiled operators."""
    if isinstance(record.msg, str) and "detectron2._C" in record.msg:
        record.msg = re.sub(r"(detectron2\._C\s+)not built correctly.*", r"\1not built, and not needed", record.msg)
    return True
