"""Transformer-LS on sequences (sections 3, 4.1, 4.2, appendices B, C): an encoder and a character language model."""

from research.sequence.char_lm import create_char_lm
from research.sequence.convert import convert_sequence_state_dict
from research.sequence.encoder import create_sequence_encoder

__all__ = ["convert_sequence_state_dict", "create_char_lm", "create_sequence_encoder"]
