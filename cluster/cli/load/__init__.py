"""`baton bench serve`: requests of data sets, sent at a pace, measured, and shown as a report.

options ──> requests (what, when) ──> client (send, time) ──> figures (numbers) ──> report (a page with plots)
"""
