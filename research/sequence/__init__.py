"""Transformer-LS on sequences (sections 3, 4.1 and 4.2, appendices B and C): an encoder and a character language model.

:func:`backbones.convert.convert_sequence_state_dict` converts official weights.
"""

from backbones.sequence.char_lm import create_char_lm
from backbones.sequence.encoder import create_sequence_encoder

__all__ = ["create_char_lm", "create_sequence_encoder"]
