"""Several processes and devices as one program: how they meet, and where arrays lie."""
