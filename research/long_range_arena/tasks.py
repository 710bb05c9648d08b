"""The three tasks and the sizes of the paper.

Sources: Transformer-LS (LS) section 4.1, appendix B, tables 1, 5 and 6; the official ``lra/run_tasks.py``,
``lra/run_*.sh`` and ``lra/datasets/*.py``. If the paper and the scripts differ (README.md), the scripts are followed.
"""

import dataclasses
from typing import Any

from backbones.errors import check_choice

# Appendix B. The vocabulary size is from run_tasks.py; the tasks have fewer ids.
ENCODER = {"vocab_size": 512, "dim": 64, "num_heads": 2, "hidden_dim": 128, "depth": 2}
# run_tasks.py. Table 6 has the same batch size and learning rate.
BATCH_SIZE, LEARNING_RATE, ADAM_BETAS, ADAM_EPSILON = 32, 1e-4, (0.9, 0.999), 1e-6

# Window w and rank r. Table 5 has the best values, with and without a window. w = 8 and r = 32 are from section 4.1.
WINDOW_AND_RANK = {
    "listops": {"best": (16, 2), "fixed": (8, 32), "projection": (0, 4)},
    "text": {"best": (1, 1), "fixed": (8, 32), "projection": (0, 128)},
    "retrieval": {"best": (1, 254), "fixed": (8, 32), "projection": (0, 256)},
}
CONFIGS = ("best", "fixed", "projection")
# warmup_steps and steps are from table 6. Weight decay, dropout, eval_every and read_length (tokens of a document that
# are read) are from the scripts.
TASKS: dict[str, dict[str, Any]] = {
    "listops": {
        **{"num_classes": 10, "num_documents": 1, "max_length": 2048, "read_length": 2000},
        **{"warmup_steps": 1000, "steps": 5000, "eval_every": 50, "weight_decay": 0.0, "dropout": 0.0},
    },
    "text": {
        **{"num_classes": 2, "num_documents": 1, "max_length": 4096, "read_length": 4000},
        **{"warmup_steps": 8000, "steps": 20000, "eval_every": 500, "weight_decay": 0.01, "dropout": 0.0},
    },
    "retrieval": {
        **{"num_classes": 2, "num_documents": 2, "max_length": 4096, "read_length": 4096},
        **{"warmup_steps": 8000, "steps": 30000, "eval_every": 300, "weight_decay": 0.01, "dropout": 0.1},
    },
}
SCHEDULES = ("linear", "fixed")
MODELS = ("ls", "full")
CLASS_TOKENS = {"all_layers": True, "last_layer": "last_layer"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model and its training.

    Attributes:
        model: ``"ls"`` for long-short attention, ``"full"`` for softmax attention over all tokens.
        class_token: A key of ``CLASS_TOKENS``: a class token in all layers as in appendix B, or only in the last layer
            as in the scripts.
        num_documents: Number of sequences of a sample. They share the encoder.
        max_length: Rows of the position table.
        read_length: Tokens of a document that are read.
        steps, warmup_steps: T and T_w of table 6.
        schedule: Learning rate after the warm-up: ``"linear"`` to zero as in the scripts, ``"fixed"`` as in appendix B.
        eval_every: Steps between two evaluations on the validation split.
    """

    task: str
    window_size: int
    rank: int
    num_classes: int
    num_documents: int
    max_length: int
    read_length: int
    warmup_steps: int
    steps: int
    eval_every: int
    weight_decay: float
    dropout: float
    attention_dropout: float
    model: str = "ls"
    class_token: str = "last_layer"
    batch_size: int = BATCH_SIZE
    learning_rate: float = LEARNING_RATE
    schedule: str = "linear"
    seed: int = 0


def published_multiply_adds(settings: Settings) -> int:
    """Count the multiply-adds of a sample of ``max_length`` tokens as table 1 does.

    Eleven of its twelve figures are the multiply-adds of fvcore, which counts 5 for each value of a LayerNorm. The
    class token is in all layers, and the last layer updates all tokens.
    """
    dim, hidden_dim, heads, depth = (ENCODER[key] for key in ("dim", "hidden_dim", "num_heads", "depth"))
    length, rank, documents, norm = settings.max_length, settings.rank, settings.num_documents, 5
    tokens = length + 1
    # Projections and MLP, and the norms before them
    layer = tokens * (4 * dim**2 + 2 * dim * hidden_dim) + 2 * tokens * dim * norm
    if settings.model == "full":
        layer += 2 * tokens**2 * dim
    else:
        # The scores and sums of the dynamic projection; keys of the sums, the class token and the window
        layer += length * dim * heads * rank + 2 * length * rank * dim
        layer += 2 * length * dim * (rank + 1 + 2 * settings.window_size)
        # The class token attends to all tokens; DualLN
        layer += 2 * tokens * dim + 2 * (tokens + rank) * dim * norm
    features = dim if documents == 1 else 4 * dim
    return documents * (depth * layer + tokens * dim * norm) + (features + settings.num_classes) * hidden_dim


def settings_for(task: str, config: str = "best", **overrides: Any) -> Settings:
    """Return the settings of a row of table 1, with overrides.

    If only ``steps`` is overridden, the warm-up has the published share of the steps.

    Raises:
        ConfigError: For an unknown name.
    """
    for name, value, choices in (("task", task, TASKS), ("config", config, CONFIGS)):
        check_choice(name, value, choices)
    window_size, rank = WINDOW_AND_RANK[task][config]
    values = {"task": task, "window_size": window_size, "rank": rank, **TASKS[task]}
    values["attention_dropout"] = values["dropout"]
    if "steps" in overrides and "warmup_steps" not in overrides:
        share = values["warmup_steps"] * overrides["steps"] // values["steps"]
        # OneCycleLR cannot warm up in a single step.
        overrides["warmup_steps"] = share if share > 1 else 0
    settings = Settings(**values | overrides)
    for name, choices in (("model", MODELS), ("class_token", CLASS_TOKENS), ("schedule", SCHEDULES)):
        check_choice(name, getattr(settings, name), choices)
    return settings
