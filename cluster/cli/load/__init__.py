"""`baton bench serve`: sends the requests of a data set at a given pace, measures them, and reports the figures.

options ──> requests (what, when) ──> client (send, time) ──> figures (numbers) ──> report (a page with plots)
"""
