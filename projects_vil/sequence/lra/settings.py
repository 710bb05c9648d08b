"""What a task of the Long Range Arena is trained with: the sizes of the paper, and what it takes from its data.

Sources: Transformer-LS section 4.1, appendix B, tables 5 and 6, all in :mod:`backbones.sequence.variants`;
NVIDIA/transformer-ls, lra/run_tasks.py, run_*.sh and datasets/*.py.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from backbones.sequence.variants import LRA, EncoderSizes
from backbones.utils.errors import check_choice

# run_tasks.py
ADAM_EPSILON, ADAM_BETAS = 1e-6, (0.9, 0.999)

# What the names of the variants end in: table 5's two rows, and the w = 8 and r = 32 of section 4.1.
CONFIGS: Mapping[str, str] = MappingProxyType({"best": "_best", "fixed": "", "projection": "_projection"})

SCHEDULES = ("linear", "fixed")
ABLATIONS = ("window", "projection")
MODELS = ("ls", "full")
CLASS_TOKENS: Mapping[str, bool | str] = MappingProxyType({"all_layers": True, "last_layer": "last_layer"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData:
    """What a task reads, and how often it is evaluated.

    Attributes:
        num_documents: sequences of a sample, which share the encoder.
        longest: tokens of a document that are read (lra/datasets/*.py).
        eval_every: steps between two evaluations on dev (run_*.sh, and the default of run_tasks.py for Text).
    """

    num_documents: int
    longest: int
    eval_every: int


TASKS: Mapping[str, TaskData] = MappingProxyType(
    {
        "listops": TaskData(num_documents=1, longest=2000, eval_every=50),
        "text": TaskData(num_documents=1, longest=4000, eval_every=500),
        "retrieval": TaskData(num_documents=2, longest=4096, eval_every=300),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model and the course of its training.

    Attributes:
        sizes: of the encoder; full attention takes no notice of window, rank and class token there.
        num_classes: of the head.
        data: of the task.
        batch_size: samples a step.
        learning_rate: the highest.
        warmup_steps, steps: T_w and T.
        eval_every: steps between two evaluations on dev.
        weight_decay: of AdamW.
        dropout: after embeddings, attention and in the MLPs.
        attention_dropout: of the attention weights.
    """

    sizes: EncoderSizes
    num_classes: int
    data: TaskData
    batch_size: int
    learning_rate: float
    warmup_steps: int
    steps: int
    eval_every: int
    weight_decay: float
    dropout: float
    attention_dropout: float

    def with_sizes(self, **changes: Any) -> "Settings":
        """The same with other sizes of the encoder."""
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, **changes))


def settings_of(
    task: str, config: str = "best", *, ablate: str | None = None, class_token: str = "last_layer"
) -> Settings:
    """What a row of table 1 is trained with, or what an ablation leaves of it.

    Where the paper and the official scripts differ, in weight decay and dropout, they are the scripts'.

    Args:
        task: a key of ``TASKS``.
        config: a key of ``CONFIGS``.
        ablate: ``"window"``, for the projection alone, or ``"projection"``, for the window alone.
        class_token: a key of ``CLASS_TOKENS``: the paper's, or that of the scripts.

    Raises:
        InputError: for an unknown name.
    """
    check_choice("task", task, TASKS)
    check_choice("config", config, CONFIGS)
    check_choice("class token", class_token, CLASS_TOKENS)
    published = LRA[task + CONFIGS[config]]
    settings = Settings(
        sizes=dataclasses.replace(published.sizes, class_token=CLASS_TOKENS[class_token]),
        num_classes=published.num_classes,
        data=TASKS[task],
        batch_size=published.batch_size,
        learning_rate=published.learning_rate,
        warmup_steps=published.warmup_steps,
        steps=published.steps,
        eval_every=TASKS[task].eval_every,
        weight_decay=published.weight_decay,
        dropout=published.dropout,
        attention_dropout=published.dropout,
    )
    if ablate is None:
        return settings
    check_choice("ablation", ablate, ABLATIONS)
    return settings.with_sizes(**{"window_size" if ablate == "window" else "rank": 0})
