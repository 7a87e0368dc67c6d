"""Files of weights: finding, reading, mapping to the model's arrays, and writing."""
