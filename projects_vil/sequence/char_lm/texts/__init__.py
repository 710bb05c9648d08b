"""A text as bytes, and as streams that are read in parts."""
