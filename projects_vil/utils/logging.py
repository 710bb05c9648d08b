"""The log of a training run, and other people's warnings and records that no user of this project can act on."""

import logging
import re
import sys
import warnings

from backbones import ConfigError

# What a run's log.txt has and its console leaves out: detectron2's internals, and pages that nobody reads there.
_FOR_THE_FILE = re.compile(
    r"Rank of current process: 0\. World size: 1$|Environment info:|Command line arguments: |"
    r"Contents of args\.config_file|Running with full config:|Full config saved to|Model:\n|"
    r"\[DatasetMapper\] Augmentations used|Using training sampler|Serializ(ing|ed) |Making batched data loader|"
    # The next line reports that there is no checkpoint.
    r"\[\w+\] Loading from  \.\.\.$|"
    r"Fast COCO eval is not built|Preparing results for COCO format|Total inference pure compute time|"
    # The table above these has the same figures, and nan for metrics that cannot be computed.
    r"copypaste: |Evaluation results for .* in csv format:|Some metrics cannot be computed"
)
# The beginning of a warning, as a regular expression, and its categories.
_WARNINGS = (
    # detectron2 scripts a few of its functions when it is imported; TorchScript is an export format.
    (r"`torch\.jit\.(script|load|save)` is deprecated", (FutureWarning, DeprecationWarning)),
    # detectron2's anchors; the order that it relies on is the default.
    (r"torch\.meshgrid: in an upcoming release", (UserWarning,)),
    # detectron2's argument of DistributedDataParallel.
    (r"`broadcast_buffers` is deprecated", (FutureWarning,)),
    # detectron2's model zoo; setup.py holds setuptools below the version without it.
    (r"pkg_resources is deprecated as an API", (UserWarning,)),
)
# Loggers, and the beginning of their records.
_RECORDS = {
    # detectron2's report of the environment looks for a compiler.
    "torch.utils.cpp_extension": r"No CUDA runtime is found",
    # Files of detectron2's model zoo are trusted as its code is.
    "fvcore.common.config": r".*/detectron2/model_zoo/.*yaml\.unsafe_load",
    # detectron2 asks torch in every Mask R-CNN whether it is traced.
    "torch.fx._symbolic_trace": r"is_fx_tracing will return true",
    "detectron2.config.compat": r"Config '.*' has no VERSION\. Assuming it to be compatible",
}


def silence_known_warnings() -> None:
    """Leave out the warnings above, before detectron2 is imported; any other is shown."""
    for text, categories in _WARNINGS:
        for category in categories:
            warnings.filterwarnings("ignore", message=text, category=category)
    for name in _RECORDS:
        logging.getLogger(name).addFilter(_is_unknown)


def _is_unknown(record: logging.LogRecord) -> bool:
    return re.match(_RECORDS[record.name], record.getMessage(), re.DOTALL) is None


def log_run(output_dir: str, *, rank: int = 0) -> None:
    """Log this project, detectron2 and fvcore to ``output_dir/log.txt``, and what concerns a user to stdout.

    Call it before detectron2's ``default_setup``, which then adds no handlers of its own.

    Args:
        output_dir: of the run.
        rank: of the process; those above 0 write files of their own, and not to stdout.
    """
    # Not at the top of the file, because it warns: the package silences that first.
    from detectron2.utils.logger import setup_logger

    # Names and arguments as in default_setup: the same arguments add no second handler.
    for options in ({"name": "fvcore"}, {}, {"name": "projects_vil"}, {"name": "backbones"}):
        for handler in setup_logger(output_dir, distributed_rank=rank, **options).handlers:
            if getattr(handler, "stream", None) is sys.stdout:
                handler.addFilter(concerns_a_user)


def concerns_a_user(record: logging.LogRecord) -> bool:
    """Leave out pages, and the traceback of a user's mistake, for which the run ends with one line."""
    if record.exc_info and isinstance(record.exc_info[1], ConfigError):
        return False
    return record.levelno > logging.WARNING or _FOR_THE_FILE.match(record.getMessage()) is None
