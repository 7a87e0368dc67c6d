"""What is minimised, one optimizer step, and what keeps a run safe."""
