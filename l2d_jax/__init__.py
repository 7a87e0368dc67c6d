"""L2D in JAX: diffusion finetuning of large language models."""
