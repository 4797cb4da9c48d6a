"""Request bodies: arrival, memory budget, and a pool of processes that read large ones (`api/body_process.py`).

body ──up to 32 KiB, few values──> read in the event loop
     ──larger──> a memory file ──> a body process parses, validates, renders and tokenizes ──> the same result
     ──too many values, or no memory left──> 400 or 503, before any object is made from it
"""
