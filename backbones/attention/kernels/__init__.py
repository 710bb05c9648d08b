"""What computes attention fast: kernels, gradients of our own, and the choice among them."""
