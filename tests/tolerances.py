"""Tolerances for two computations of the same values, so that a test passes on every processor.

Other instructions, batches, layouts or numbers of threads round differently. Compare in float64 if the code supports
it, with the default tolerance of ``torch.testing.assert_close``. Otherwise use ``FLOAT32``.
"""

# Two float32 computations differ by about 1e-6 of the largest value after one layer, and by less than 1e-4 after a
# whole model. A wrong formula, index, weight or size changes values by more than 1e-2.
FLOAT32 = {"rtol": 1e-3, "atol": 1e-3}
