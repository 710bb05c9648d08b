"""What every tool needs."""
