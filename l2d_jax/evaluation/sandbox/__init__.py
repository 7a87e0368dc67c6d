"""Runs programs that a model has written, isolated from everything else."""
