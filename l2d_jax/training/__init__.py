"""Training: losses, the optimizer step, runs, checkpoints and logs."""
