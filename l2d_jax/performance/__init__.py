"""What training and decoding cost: counted, compiled for TPUs, and measured."""
