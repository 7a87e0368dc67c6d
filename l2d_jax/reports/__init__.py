"""Tables, figures and pages of measurements."""
