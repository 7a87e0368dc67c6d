"""The frozen language model and the diffusion path, as pytrees of stacked layers."""
