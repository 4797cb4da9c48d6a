"""KV blocks: their owners, the steps that may still access them, and their copies to other engines and tiers."""
