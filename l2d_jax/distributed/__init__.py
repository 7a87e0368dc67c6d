"""Several processes and devices as one program: how the processes meet, and where arrays lie."""
