"""Transformer-LS on sequences (sections 3, 4.1 and 4.2, appendices B and C): an encoder and a character language model.

Plain PyTorch. The sizes of the paper's experiments are in :mod:`backbones.sequence.variants`, and
:func:`backbones.convert.convert_sequence_state_dict` takes official weights.
"""

from backbones.sequence.build import create_char_lm, create_sequence_encoder

__all__ = ["create_char_lm", "create_sequence_encoder"]
