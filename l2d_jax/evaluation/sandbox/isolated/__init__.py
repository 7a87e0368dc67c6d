"""The code inside the isolated processes. It imports only the standard library and this package."""
