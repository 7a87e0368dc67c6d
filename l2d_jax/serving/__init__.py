"""An HTTP server for a loaded model, with OpenAI's API and a web page."""
