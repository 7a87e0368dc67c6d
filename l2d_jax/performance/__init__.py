"""The costs of training and decoding: counted from shapes, compiled for TPUs, and measured."""
