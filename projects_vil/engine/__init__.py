"""Training and evaluation from the command line."""
