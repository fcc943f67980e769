"""Pictures of a trace, drawn with matplotlib.

Without torch, and never by the code that recorded the trace. Each file holds one kind of picture.
A picture is drawn in three steps. What it shows is computed apart from the drawing (``bars`` and
``traffic`` without matplotlib), so that tests can count it. ``sheet`` gives a figure its size, and
``rows`` its axes their lanes. Then the file of the picture draws, and ``style`` puts the words
around it.
"""
