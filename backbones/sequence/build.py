"""Sizes in, models on sequences out."""

from backbones.sequence.char_lm import CharLM
from backbones.sequence.checks import check_heads, check_rate, check_whole
from backbones.sequence.encoder import SequenceEncoder
from backbones.utils.errors import InputError, explain_unknown_keywords


@explain_unknown_keywords
def create_sequence_encoder(
    *,
    vocab_size: int,
    dim: int,
    num_heads: int,
    hidden_dim: int,
    depth: int,
    max_length: int,
    window_size: int,
    rank: int,
    class_token: bool | str,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> SequenceEncoder:
    """An encoder with random weights: ids (B, N) and a mask (B, N) -> (B, 1, dim), or (B, N, dim) without class token.

    Args:
        vocab_size: ids are below it.
        dim: channels of a token.
        num_heads: divides ``dim``.
        hidden_dim: channels inside the MLPs.
        depth: layers.
        max_length: most tokens of a sequence.
        window_size: w, tokens of a segment; a token sees its segment and w // 2 tokens, at least 1, on each side of it.
            0 for the dynamic projection alone.
        rank: r, projected keys of a head; 0 for the window alone.
        class_token: whether a token that all others see, and that sees all others, is the output; ``"last_layer"`` for
            one that is there in the last layer alone, as in the official scripts.
        dropout: rate after the embeddings, the attention and in the MLPs, in training.
        attention_dropout: rate of the attention weights that are left out, in training.

    Raises:
        InputError: for an unknown keyword, which names the closest known one, and for a value that cannot be.
    """
    sizes = {"vocab_size": vocab_size, "dim": dim, "num_heads": num_heads, "hidden_dim": hidden_dim}
    sizes |= {"depth": depth, "max_length": max_length}
    for name, value in sizes.items():
        check_whole(name, value)
    check_whole("window_size", window_size, least=0)
    check_whole("rank", rank, least=0)
    check_heads(dim, num_heads)
    if class_token is not True and class_token is not False and class_token != "last_layer":
        raise InputError(f"class_token={class_token!r}: it is True, False or 'last_layer'")
    check_rate("dropout", dropout)
    check_rate("attention_dropout", attention_dropout)
    if not window_size and not rank:
        raise InputError("window_size=0 and rank=0: a token sees nothing; make one of them 1 or more")
    return SequenceEncoder(
        **sizes,
        window_size=window_size,
        rank=rank,
        class_token=class_token,
        dropout=dropout,
        attention_dropout=attention_dropout,
    )


@explain_unknown_keywords
def create_char_lm(
    *,
    vocab_size: int,
    dim: int,
    hidden_dim: int,
    num_heads: int,
    depth: int,
    memory_length: int,
    segment_length: int,
    rank: int,
    window_size: int,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
) -> CharLM:
    """A character language model with random weights: ids (B, N) -> log-probabilities (B, N, vocab_size) and a memory.

    No weight depends on ``memory_length``, ``segment_length`` and ``window_size``: a trained model may be tested with
    others, as the paper does with a memory of 32768.

    Args:
        vocab_size: ids are below it.
        dim: channels of a token, even.
        hidden_dim: channels inside the MLPs.
        num_heads: divides ``dim``.
        depth: layers.
        memory_length: tokens of the memory, a multiple of ``segment_length``, and ``window_size`` or more.
        segment_length: l, tokens that are summed up together.
        rank: r, projected keys of a segment and head.
        window_size: w, tokens that a token sees, itself included.
        dropout: rate after the embeddings, the attention, in the MLPs and before the last layer, in training.
        attention_dropout: rate of the attention weights that are left out, in training.

    Raises:
        InputError: for an unknown keyword, which names the closest known one, and for a value that cannot be.
    """
    sizes = {"vocab_size": vocab_size, "dim": dim, "hidden_dim": hidden_dim, "num_heads": num_heads, "depth": depth}
    sizes |= {"memory_length": memory_length, "segment_length": segment_length, "rank": rank}
    sizes["window_size"] = window_size
    for name, value in sizes.items():
        check_whole(name, value)
    check_heads(dim, num_heads)
    check_rate("dropout", dropout)
    check_rate("attention_dropout", attention_dropout)
    if dim % 2:
        raise InputError(f"dim={dim}: it is even, for half of it are sines and half cosines of positions")
    if memory_length % segment_length:
        raise InputError(
            f"memory_length={memory_length} is no multiple of segment_length={segment_length}: make it one"
        )
    if memory_length < window_size:
        raise InputError(f"memory_length={memory_length} is below window_size={window_size}: raise it")
    return CharLM(**sizes, dropout=dropout, attention_dropout=attention_dropout)
