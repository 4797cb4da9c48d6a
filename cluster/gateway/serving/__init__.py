"""One sequence's way through engines: admission, attempts, retries, timeline."""
