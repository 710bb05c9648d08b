"""What stages are built of besides attention."""
