"""The PyTorch class of a published path: two files that stand alone and are copied into its folder."""
