"""Draw datasets, predictions, attention maps and sampling positions."""
