"""Character language models: long-short attention over a text's bytes beside full attention (section 4.2)."""

from projects_vil.sequence.char_lm.checkpoints import LAST, Trained, best_path, load_trained
from projects_vil.sequence.char_lm.commands import (
    DEFAULT_PROMPT,
    evaluate_file,
    generate_from_file,
    measure_config,
    train_and_test,
)
from projects_vil.sequence.char_lm.evaluation import bits_per_character
from projects_vil.sequence.char_lm.generation import generate
from projects_vil.sequence.char_lm.measuring import Cost, measure_steps
from projects_vil.sequence.char_lm.models.build import KINDS, create_model
from projects_vil.sequence.char_lm.models.presets import (
    PRESETS,
    PUBLISHED_TEST_MEMORY,
    PUBLISHED_TEST_PART,
    ModelSize,
    phases_of,
    size_of,
)
from projects_vil.sequence.char_lm.results import Sampling, format_results
from projects_vil.sequence.char_lm.texts.streams import Part, Streams
from projects_vil.sequence.char_lm.texts.text import Text, Vocabulary, read_text
from projects_vil.sequence.char_lm.training import Line, Settings, Training, settings_of

__all__ = [
    "DEFAULT_PROMPT",
    "KINDS",
    "LAST",
    "PRESETS",
    "PUBLISHED_TEST_MEMORY",
    "PUBLISHED_TEST_PART",
    "Cost",
    "Line",
    "ModelSize",
    "Part",
    "Sampling",
    "Settings",
    "Streams",
    "Text",
    "Trained",
    "Training",
    "Vocabulary",
    "best_path",
    "bits_per_character",
    "create_model",
    "evaluate_file",
    "format_results",
    "generate",
    "generate_from_file",
    "load_trained",
    "measure_config",
    "measure_steps",
    "phases_of",
    "read_text",
    "settings_of",
    "size_of",
    "train_and_test",
]
