"""Memory behind an engine's pool: the host's, then a disk's. See docs/kv_tiers.md.

EngineCore ── TierCopies ──KVTiers──> TierStore ── TierBooks         in the step's thread: what lies where
                                          └─moves──> TierWorker      in a thread of its own: copies, files
"""
