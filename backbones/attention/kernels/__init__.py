"""What computes attention fast: chunks, kernels, gradients of our own, and the choice among backends."""
