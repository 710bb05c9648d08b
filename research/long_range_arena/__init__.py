"""The Long Range Arena (Transformer-LS section 4.1, appendix B)."""
