"""Request bodies: arrival, memory budget, and a pool of processes that read large ones (`api/body_process.py`).

body ──up to 32 KiB, few values──> read in the event loop
     ──larger──> a file in memory ──> a process of its own: parse, validate, render, tokenize ──> the same result
     ──too many values, or no memory left──> 400, 503, before any object is made of it
"""
