"""Tables, figures and pages of what runs have measured."""
