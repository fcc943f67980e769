"""Draws pictures of traces with matplotlib.

Drawing does not need torch, and is independent of the code that records traces. Each file draws one
kind of picture, in three steps. First, the contents of the picture are computed (in ``bars`` and
``traffic``, without matplotlib), so that tests can count them. Then ``sheet`` sets the size of the
figure, and ``rows`` divides the axes into lanes. Finally, the picture's own file draws the
contents, with a label for each look, and ``style`` adds the text around them, with a legend of
these labels. The fonts and lines are in ``ringsim/data/pictures.mplstyle``, and the colours in
``looks.json``.
"""
