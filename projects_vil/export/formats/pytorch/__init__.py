"""The formats that PyTorch itself writes and runs."""
