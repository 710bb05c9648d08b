"""Attention that the ViL paper sets beside its own (section 3.3 and appendix D)."""
