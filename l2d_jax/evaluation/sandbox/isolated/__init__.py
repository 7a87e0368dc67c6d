"""The code inside the isolated processes, which imports the standard library and nothing else of this package."""
