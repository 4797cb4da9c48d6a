"""One sequence on its way through engines: admission, attempts, retries, timeline."""
