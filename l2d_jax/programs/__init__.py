"""What each program does once its command line is parsed: `run(options)`, with the libraries that it takes."""
