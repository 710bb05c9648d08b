"""The models that are compared, with the paper's sizes and phases of training by name."""
