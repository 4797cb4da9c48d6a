"""The engine without a server: `LLM` for scripts, and benchmarks of a single engine and its parts."""
