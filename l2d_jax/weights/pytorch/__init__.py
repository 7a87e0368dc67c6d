"""The PyTorch class of a published path: files without other dependencies, which are copied into its folder."""
