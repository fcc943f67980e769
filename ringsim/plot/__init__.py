"""Pictures of a trace, drawn with matplotlib: never with torch, and never by whoever recorded the trace.

``plot_ring`` shows who sent to whom, ``plot_timeline`` who did what when, ``png`` both, for a notebook. Each file holds one noun: the
numbers that a picture shows (``graph``, ``bars``, ``density``) are computed apart from the drawing, so that tests can count them.
"""
