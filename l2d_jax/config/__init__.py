"""Options: what they are, which go together, and how a config file, its variants and overrides are read."""

from l2d_jax.config.schema import defaults as defaults
