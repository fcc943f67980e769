"""Pictures of a trace, drawn with matplotlib.

Drawing needs no torch, and runs apart from the code that records traces. Each file holds one kind
of picture. A picture is drawn in three steps. First, its contents are computed (in ``bars`` and
``traffic``, without matplotlib), so that tests can count them. Then ``sheet`` sets the size of the
figure, and ``rows`` divides the axes into lanes. Finally, the picture's own file draws, and
``style`` adds the text around it.
"""
