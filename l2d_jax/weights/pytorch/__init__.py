"""The PyTorch class of a published path: files that stand alone and are copied into its folder."""
