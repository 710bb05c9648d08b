"""The datasets that are registered without a key, and small ones that are made here."""
