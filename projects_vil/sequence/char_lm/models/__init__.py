"""The models that are compared: long-short attention, and full attention of the same size."""
