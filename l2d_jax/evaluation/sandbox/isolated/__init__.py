"""What runs inside the isolated processes: the standard library only, and nothing of the rest of this package."""
