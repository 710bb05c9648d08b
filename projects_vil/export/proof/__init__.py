"""The proof of equal answers: a file beside detectron2, pair by pair."""
