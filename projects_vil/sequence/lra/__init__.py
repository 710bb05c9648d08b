"""The Long Range Arena (Transformer-LS section 4.1, appendix B): data, classifiers, training and measuring."""

from projects_vil.sequence.lra.examples import Batch, Dataset, Examples, Sequences
from projects_vil.sequence.lra.listops import ListOpsRules, generate_listops, words_of
from projects_vil.sequence.lra.measuring import LengthCost, format_costs, measure_lengths
from projects_vil.sequence.lra.model import create_lra_classifier
from projects_vil.sequence.lra.readers import read_imdb, read_pairs
from projects_vil.sequence.lra.settings import (
    ABLATIONS,
    CLASS_TOKENS,
    CONFIGS,
    MODELS,
    SCHEDULES,
    TASKS,
    Settings,
    TaskData,
    settings_of,
)
from projects_vil.sequence.lra.storage import load_listops, read_released_listops, without_brackets
from projects_vil.sequence.lra.training import (
    Evaluation,
    Result,
    Run,
    Score,
    check_output,
    load_lra_classifier,
    score,
    train_lra,
)

__all__ = [
    "ABLATIONS",
    "CLASS_TOKENS",
    "CONFIGS",
    "MODELS",
    "SCHEDULES",
    "TASKS",
    "Batch",
    "Dataset",
    "Evaluation",
    "Examples",
    "LengthCost",
    "ListOpsRules",
    "Result",
    "Run",
    "Score",
    "Sequences",
    "Settings",
    "TaskData",
    "check_output",
    "create_lra_classifier",
    "format_costs",
    "generate_listops",
    "load_listops",
    "load_lra_classifier",
    "measure_lengths",
    "read_imdb",
    "read_pairs",
    "read_released_listops",
    "score",
    "settings_of",
    "train_lra",
    "without_brackets",
    "words_of",
]
