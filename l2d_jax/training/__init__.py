"""Training: the losses, the optimizer step, the run, its checkpoints and its log."""
