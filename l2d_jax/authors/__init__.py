"""Runs a checkout of the authors' release: records what it computes, and times it next to this package."""
