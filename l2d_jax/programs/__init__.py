"""The work of each program after its command line was parsed: `run(options)`. Large libraries are imported here."""
