"""The long-short and the full attention model, and the paper's sizes and training phases.

The full attention model attends to the whole memory and block, as Transformer-XL does. Everything else is as in the
official Transformer-LS: a layer normalizes its input and adds to the normalized input, and the output shares the matrix
of the embedding. Positions are rotations of queries and keys. Transformer-XL has a learned bias for each pair of
positions instead, a matrix that fused attention avoids.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention.dense import merge_heads, pytorch_attention, split_heads
from backbones.errors import ConfigError, check_choice
from research.sequence import create_char_lm
from research.sequence.char_lm import CharLMLayer

MODELS = ("long_short", "full")
TITLES = {"long_short": "long-short", "full": "full attention"}
# fairseq's Adam, as in the scripts. Its weight decay is decoupled and acts on all parameters.
BETAS, EPSILON = (0.9, 0.999), 1e-8
# The bytes of enwik8 and the id of unknown bytes, for models that are measured without a text
VOCAB_SIZE = 206


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of both models. Only the long-short model has a window, segments and a rank (w, l, r of appendix C).

    Attributes:
        dim, hidden_dim, num_heads: ``--d-model``, ``--d-inner`` and ``--n-head`` of the official launch scripts.
        depth: LS section 4.2.
    """

    depth: int
    dim: int = 512
    hidden_dim: int = 2048
    num_heads: int = 8
    window_size: int = 512
    segment_length: int = 16
    rank: int = 1


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of training, with blocks and memory of the same length (section 4.2).

    Attributes:
        length: Bytes of a block, and of the memory.
        steps, warmup_steps: Appendix C. The learning rate is constant after the linear warm-up.
        learning_rate: From the official scripts; the first one is also in appendix C.
        batch_size: Parallel streams on all devices together (appendix C).
    """

    length: int
    steps: int
    warmup_steps: int
    learning_rate: float
    batch_size: int

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup_steps, 1))


PHASES = (
    Phase(length=2048, steps=430_000, warmup_steps=10_000, learning_rate=2.5e-4, batch_size=32),
    Phase(length=4096, steps=50_000, warmup_steps=5_000, learning_rate=1.25e-4, batch_size=32),
    Phase(length=8192, steps=50_000, warmup_steps=5_000, learning_rate=6.25e-5, batch_size=16),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model of LS table 2.

    Attributes:
        dropout, weight_decay: Appendix C.
    """

    size: ModelSize
    dropout: float
    weight_decay: float
    phases: tuple[Phase, ...] = PHASES


CONFIGS = {
    "small": Config(size=ModelSize(depth=12), dropout=0.2, weight_decay=0.01),
    "large": Config(size=ModelSize(depth=30), dropout=0.4, weight_decay=0.1),
}
# Appendix C has 5e-4 for text8. The later phases have the ratios of enwik8.
_TEXT8_PHASES = tuple(replace(phase, learning_rate=2 * phase.learning_rate) for phase in PHASES)
CONFIGS["text8"] = replace(CONFIGS["small"], phases=_TEXT8_PHASES)


def size_for(config: str, **overrides: int) -> ModelSize:
    """Return the size of a config, with overrides. If only ``dim`` is overridden, ``hidden_dim`` keeps its ratio."""
    check_choice("config", config, CONFIGS)
    size = CONFIGS[config].size
    if "dim" in overrides and "hidden_dim" not in overrides:
        overrides["hidden_dim"] = overrides["dim"] * size.hidden_dim // size.dim
    return replace(size, **overrides)


def phases_for(config: str, **overrides: Sequence[float]) -> tuple[Phase, ...]:
    """Return the phases of a config, with overrides.

    Args:
        overrides: For each field one value for all phases, or one for each phase. The number of ``steps`` is the number
            of phases. If only ``steps`` is overridden, the warm-up keeps its share of the steps.

    Raises:
        ConfigError: If the number of values does not match the number of phases.
    """
    check_choice("config", config, CONFIGS)
    phases = CONFIGS[config].phases[: len(overrides.get("steps", PHASES))]
    for name, values in overrides.items():
        if len(values) not in (1, len(phases)):
            raise ConfigError(
                f"{name} has {len(values)} values for {len(phases)} phases. Give one value, or one for each phase."
            )
    changed = []
    for index, phase in enumerate(phases):
        values = {name: values[index % len(values)] for name, values in overrides.items()}
        if "steps" in values and "warmup_steps" not in values:
            values["warmup_steps"] = int(phase.warmup_steps * values["steps"] // phase.steps)
        changed.append(replace(phase, **values))
    return tuple(changed)


def create_model(name: str, size: ModelSize, *, vocab_size: int, memory_length: int, dropout: float = 0.0) -> nn.Module:
    """Create a model with random weights. No weight depends on ``memory_length``.

    Args:
        name: One of ``MODELS``. Both map ids (B, N), and a memory or None, to log-probabilities (B, N, V) and the next
            memory.

    Raises:
        ConfigError: For invalid sizes.
    """
    check_choice("model", name, MODELS)
    options = {**asdict(size), "vocab_size": vocab_size, "memory_length": memory_length, "dropout": dropout}
    if name == "long_short":
        return create_char_lm(**options)
    for field in ("window_size", "segment_length", "rank"):
        del options[field]
    return FullAttentionLM(**options)


def count_parameters(name: str, size: ModelSize, vocab_size: int = VOCAB_SIZE) -> int:
    """Count the parameters of a model. The embedding, which is shared with the output, counts once."""
    with torch.device("meta"):
        model = create_model(name, size, vocab_size=vocab_size, memory_length=size.segment_length * size.window_size)
    return sum(parameter.numel() for parameter in model.parameters())


_ROTATION_BASE = 10_000.0


def rotate(x: Tensor, first: int) -> Tensor:
    """Rotate pairs of channels of (B, M, N, D) by angles in proportion to the position, which starts at ``first``."""
    half = x.shape[-1] // 2
    frequencies = _ROTATION_BASE ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    positions = torch.arange(first, first + x.shape[-2], device=x.device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first_half, second_half = x[..., :half], x[..., half : 2 * half]
    rotated = torch.cat([first_half * cos - second_half * sin, first_half * sin + second_half * cos], dim=-1)
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)


class FullAttention(nn.Module):
    """Causal multi-head attention of a block's N tokens over themselves and L tokens of memory."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor, past: Tensor, *_: None) -> Tensor:
        """(B, N, C) and (B, L, C), L of 0 or more -> (B, N, C)"""
        num_past, number = past.shape[1], tokens.shape[1]
        key, value = self.key_value(torch.cat([past, tokens], dim=1)).chunk(2, dim=-1)
        query, key, value = (split_heads(x, self.num_heads) for x in (self.query(tokens), key, value))
        query, key = rotate(query, num_past), rotate(key, 0)
        # Without a memory, the fused kernel needs no mask.
        mask = tokens.new_ones((number, num_past + number), dtype=torch.bool).tril(num_past) if num_past else None
        output = pytorch_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.proj(merge_heads(output))


class FullAttentionLM(nn.Module):
    """Ids (B, N) and the memory of earlier blocks -> log-probabilities (B, N, vocab_size) and the next memory.

    Args:
        vocab_size: Number V of ids.
        dim: Channels of a token.
        num_heads: Number of heads. It divides ``dim``.
        hidden_dim: Channels inside the MLPs.
        depth: Layers.
        memory_length: Maximum number of tokens in the memory.
        dropout: Dropout rate after the embedding and the attention, in the MLPs, and before the output.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        depth: int,
        memory_length: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.memory_length = memory_length
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            CharLMLayer(dim, FullAttention(dim, num_heads), hidden_dim=hidden_dim, dropout=dropout)
            for _ in range(depth)
        )
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for layer in self.layers:
            # Queries, keys and values have variance 1, as after the norms of the long-short model. Otherwise the
            # attention of a narrow model is uniform for hundreds of steps.
            for projection in (layer.attention.query, layer.attention.key_value):
                nn.init.normal_(projection.weight, std=dim**-0.5)

    def forward(self, ids: Tensor, memory: Sequence[Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Predict the next ids. The memory is the input of each layer, (B, L, C); None at the start of a text."""
        tokens = self.dropout(self.embedding(ids) * self.embedding.embedding_dim**0.5)
        next_memory = []
        for index, layer in enumerate(self.layers):
            past = tokens[:, :0].detach() if memory is None else memory[index]
            next_memory.append(torch.cat([past, tokens.detach()], dim=1)[:, -self.memory_length :])
            tokens = layer(tokens, past, None, None)
        logits = F.linear(self.dropout(tokens), self.embedding.weight, self.output_bias)
        return logits.log_softmax(dim=-1), tuple(next_memory)
