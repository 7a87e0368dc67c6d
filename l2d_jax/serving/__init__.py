"""A server of a loaded model with OpenAI's API, and the web page that it shows."""
