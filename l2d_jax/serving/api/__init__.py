"""OpenAI's API: what requests may say, what is made of them, and what comes back."""
