"""OpenAI's API: requests are validated and prepared, responses are written."""
