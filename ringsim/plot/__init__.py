"""Pictures of a trace, drawn with matplotlib.

Without torch, and never by the code that recorded the trace. Each file holds one kind of picture.
``style`` has the colours, fonts and words around a picture, ``sheet`` places pictures on a figure,
and ``layout`` draws the rows of bars of all pictures of time. The numbers that a picture shows (a
graph, bars, curves) are computed apart from the drawing, so that tests can count them.
"""
