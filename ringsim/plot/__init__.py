"""Pictures of a trace, drawn with matplotlib.

Without torch, and never by the code that recorded the trace. Each file holds one kind of picture.
``style`` has what they share, ``layout`` what pictures of time are made of. The numbers that a
picture shows (a graph, bars, curves) are computed apart from the drawing, so that tests can count
them.
"""
