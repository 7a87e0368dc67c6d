"""Files of weights: how they are found, read, mapped to the model's arrays and written."""
