"""Several processes and devices as one program: how processes find each other, and where arrays are placed."""
