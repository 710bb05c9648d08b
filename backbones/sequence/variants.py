"""The sizes of the paper's experiments on sequences, once, with what each was trained by.

``dataclasses.asdict(LRA["listops"].sizes)`` are keywords of :func:`backbones.sequence.create_sequence_encoder`, and
those of ``CHAR_LMS["enwik8_small"].sizes``, with a ``vocab_size``, of :func:`backbones.sequence.create_char_lm`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Of the models of the Long Range Arena: appendix B, and the defaults of the official ``lra/run_tasks.py``.

    Attributes:
        vocab_size: of the official ``lra/run_tasks.py``; the tasks have fewer ids.
        dim, num_heads, hidden_dim, depth: appendix B.
        max_length: tokens; of each of the two documents in Retrieval (appendix B).
        window_size: w.
        rank: r.
        class_token: appendix B says that there is one; the official scripts have it in the last layer alone
            (``--cls_last_layer``).
    """

    max_length: int
    window_size: int
    rank: int
    vocab_size: int = 512
    dim: int = 64
    num_heads: int = 2
    hidden_dim: int = 128
    depth: int = 2
    class_token: bool | str = "last_layer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRATask:
    """A task of the Long Range Arena with one choice of w and r.

    Attributes:
        sizes: of the encoder.
        num_classes: of the official scripts.
        warmup_steps, steps: T_w and T of Table 6.
        weight_decay: of the official scripts; appendix B says that there is none.
        dropout: in the model and of its attention weights, of the official scripts.
        accuracy: in percent, of Table 1.
    """

    sizes: EncoderSizes
    num_classes: int
    warmup_steps: int
    steps: int
    weight_decay: float
    dropout: float
    accuracy: float

    # Table 6, the same for all tasks: Adam, its rate fixed after the warm-up.
    batch_size = 32
    learning_rate = 1e-4


_LISTOPS = {"num_classes": 10, "warmup_steps": 1000, "steps": 5000, "weight_decay": 0.0, "dropout": 0.0}
_TEXT = {"num_classes": 2, "warmup_steps": 8000, "steps": 20000, "weight_decay": 0.01, "dropout": 0.0}
# The official script names no dropout, and the default of run_tasks.py is 0.1.
_RETRIEVAL = {"num_classes": 2, "warmup_steps": 8000, "steps": 30000, "weight_decay": 0.01, "dropout": 0.1}


def _sizes(max_length: int, window_size: int, rank: int) -> EncoderSizes:
    return EncoderSizes(max_length=max_length, window_size=window_size, rank=rank)


# Without a suffix w = 8 and r = 32, as the official scripts run; "_best" the best w and r, "_projection" the best
# without a window: Table 5.
LRA = {
    "listops": LRATask(sizes=_sizes(2048, 8, 32), accuracy=37.50, **_LISTOPS),
    "listops_best": LRATask(sizes=_sizes(2048, 16, 2), accuracy=38.36, **_LISTOPS),
    "listops_projection": LRATask(sizes=_sizes(2048, 0, 4), accuracy=37.79, **_LISTOPS),
    "text": LRATask(sizes=_sizes(4096, 8, 32), accuracy=66.01, **_TEXT),
    "text_best": LRATask(sizes=_sizes(4096, 1, 1), accuracy=68.40, **_TEXT),
    "text_projection": LRATask(sizes=_sizes(4096, 0, 128), accuracy=66.28, **_TEXT),
    "retrieval": LRATask(sizes=_sizes(4096, 8, 32), accuracy=81.79, **_RETRIEVAL),
    "retrieval_best": LRATask(sizes=_sizes(4096, 1, 254), accuracy=81.95, **_RETRIEVAL),
    "retrieval_projection": LRATask(sizes=_sizes(4096, 0, 256), accuracy=81.86, **_RETRIEVAL),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharLMSizes:
    """Of the character language models: appendix C, and the official scripts in ``autoregressive/launch``.

    Attributes:
        depth: 12 for the smaller model and 30 for the larger one (section 4.2).
        dim, hidden_dim, num_heads: ``--d-model``, ``--d-inner`` and ``--n-head`` of the scripts.
        memory_length: of the first phase of training (``--mem-len``); it is the length of the part in each.
        segment_length, rank, window_size: l, r and w of appendix C.
    """

    depth: int
    dim: int = 512
    hidden_dim: int = 2048
    num_heads: int = 8
    memory_length: int = 2048
    segment_length: int = 16
    rank: int = 1
    window_size: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of training: the part and the memory have the same length (section 4.2).

    Attributes:
        length: tokens of a part, and of the memory.
        steps, warmup_steps: appendix C; the rate is constant after the warm-up.
        learning_rate: of the official scripts; that of the first phase is in appendix C.
        batch_size: parts in a step, on all devices together (appendix C).
    """

    length: int
    steps: int
    warmup_steps: int
    learning_rate: float
    batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharLMTask:
    """A model on a text.

    Attributes:
        sizes: of the model.
        phases: in their order.
        dropout, weight_decay: appendix C.
        bits_per_character: on the test set (Table 2).
    """

    sizes: CharLMSizes
    phases: tuple[Phase, ...]
    dropout: float
    weight_decay: float
    bits_per_character: float


def _phases(learning_rate: float) -> tuple[Phase, ...]:
    """Each with half the rate of the one before."""
    return tuple(
        Phase(
            length=length,
            steps=steps,
            warmup_steps=warmup,
            learning_rate=learning_rate / 2**number,
            batch_size=batch_size,
        )
        for number, (length, steps, warmup, batch_size) in enumerate(
            ((2048, 430_000, 10_000, 32), (4096, 50_000, 5_000, 32), (8192, 50_000, 5_000, 16))
        )
    )


_SMALL = {"sizes": CharLMSizes(depth=12), "dropout": 0.2, "weight_decay": 0.01}
_LARGE = {"sizes": CharLMSizes(depth=30), "dropout": 0.4, "weight_decay": 0.1}

CHAR_LMS = {
    "enwik8_small": CharLMTask(phases=_phases(2.5e-4), bits_per_character=0.99, **_SMALL),
    "text8_small": CharLMTask(phases=_phases(5e-4), bits_per_character=1.09, **_SMALL),
    "enwik8_large": CharLMTask(phases=_phases(2.5e-4), bits_per_character=0.97, **_LARGE),
}
