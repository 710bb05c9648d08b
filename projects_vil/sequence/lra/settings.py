"""What the paper and the official code train with on the Long Range Arena; the numbers stand here and nowhere else.

Sources: Transformer-LS section 4.1, appendix B, tables 5 and 6; NVIDIA/transformer-ls, lra/run_tasks.py and run_*.sh.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from backbones.errors import check_choice


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """Sizes of the encoder, the same for all tasks (appendix B).

    Attributes:
        vocab_size: rows of the table of words, of which a task needs 16 or 257 (run_tasks.py).
        dim: channels of a token, d.
        num_heads: h.
        hidden_dim: channels inside the MLPs and the head.
        depth: layers.
    """

    vocab_size: int = 512
    dim: int = 64
    num_heads: int = 2
    hidden_dim: int = 128
    depth: int = 2


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Window size w and rank r of the dynamic projection; 0 for none."""

    window_size: int
    rank: int


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """How a task is trained.

    Attributes:
        num_classes: of the head (run_*.sh).
        num_documents: sequences of a sample, which share the encoder.
        longest: tokens of a document that are read (lra/datasets/*.py).
        max_length: rows of the table of positions (appendix B).
        learning_rate: the highest (table 6).
        batch_size: samples a step (table 6).
        warmup_steps: T_w (table 6).
        steps: T (table 6).
        eval_every: steps between two evaluations on dev (run_*.sh; Text has the default of run_tasks.py).
        dropout: after embeddings, attention and in the MLPs; ``attention_dropout``, of its weights (run_*.sh, and
            run_tasks.py for Retrieval, whose script does not say).
    """

    num_classes: int
    num_documents: int
    longest: int
    max_length: int
    learning_rate: float
    batch_size: int
    warmup_steps: int
    steps: int
    eval_every: int
    dropout: float
    attention_dropout: float


# run_tasks.py; the paper says Adam without weight decay.
ADAM_EPSILON, ADAM_BETAS, WEIGHT_DECAY = 1e-6, (0.9, 0.999), 0.0

ENCODER = EncoderSettings()

TASKS: Mapping[str, TaskSettings] = MappingProxyType(
    {
        "listops": TaskSettings(10, 1, 2000, 2048, 1e-4, 32, 1000, 5000, 50, 0.0, 0.0),
        "text": TaskSettings(2, 1, 4000, 4096, 1e-4, 32, 8000, 20000, 500, 0.0, 0.0),
        "retrieval": TaskSettings(2, 2, 4096, 4096, 1e-4, 32, 8000, 30000, 300, 0.1, 0.1),
    }
)

# "best" and "projection": table 5, Transformer-LS and Dynamic Projection; "fixed": section 4.1.
CONFIGS = ("best", "fixed", "projection")
_FIXED = AttentionSettings(8, 32)
ATTENTION: Mapping[str, Mapping[str, AttentionSettings]] = MappingProxyType(
    {
        "listops": MappingProxyType(
            {"best": AttentionSettings(16, 2), "fixed": _FIXED, "projection": AttentionSettings(0, 4)}
        ),
        "text": MappingProxyType(
            {"best": AttentionSettings(1, 1), "fixed": _FIXED, "projection": AttentionSettings(0, 128)}
        ),
        "retrieval": MappingProxyType(
            {"best": AttentionSettings(1, 254), "fixed": _FIXED, "projection": AttentionSettings(0, 256)}
        ),
    }
)

SCHEDULES = ("linear", "fixed")
ABLATIONS = ("window", "projection")
MODELS = ("ls", "full")


def attention_of(task: str, config: str, *, ablate: str | None = None) -> AttentionSettings:
    """Window and rank of a task's row in the tables, or what an ablation leaves of it.

    Args:
        task: a key of ``TASKS``.
        config: of ``CONFIGS``.
        ablate: ``"window"``, for the projection alone, or ``"projection"``, for the window alone.

    Raises:
        InputError: for an unknown name.
    """
    check_choice("task", task, TASKS)
    check_choice("config", config, CONFIGS)
    attention = ATTENTION[task][config]
    if ablate is None:
        return attention
    check_choice("ablation", ablate, ABLATIONS)
    return dataclasses.replace(attention, **{"window_size" if ablate == "window" else "rank": 0})
