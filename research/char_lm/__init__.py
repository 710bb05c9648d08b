"""Character language models (Transformer-LS section 4.2, appendix C)."""
