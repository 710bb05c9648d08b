"""Parameters, FLOPs and time of models."""
