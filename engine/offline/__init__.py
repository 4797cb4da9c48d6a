"""The engine without a server: `LLM` for scripts, and what measures an engine by itself."""
