"""The experiments of Transformer-LS on sequences, in plain PyTorch: a room of one folder for each."""

__all__ = []
