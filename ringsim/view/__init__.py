"""The interactive view of a run.

It is one HTML file that works without a network, a server or a library; in notebooks, it is a
widget. ``html`` encodes a trace and puts it into a page with the program that shows it. The program
is the JavaScript in ``page/``: plain functions and classes on Canvas 2D, one file per subject,
concatenated in the order of ``html.PROGRAM``::

    columns.js   reads the bytes; lanes on which bars do not overlap; the states of an operation
    pyramid.js   the state that fills most of each time bin, by repeated halving, for drawing a
                 million events
    timeline.js  rows of ranks, pixels, arrows, the ruler, the overview
    ring.js      messages in flight at one moment; the matrix for many ranks
    panels.js    the card of an event, findings, statistics, bandwidths, the table for screen
                 readers
    steps.js     pipeline steps: bubbles, live activations
    critical.js  the critical path
    main.js      pointer, wheel, keys, search, playing
    page.js      shows the traces of a page,
    explorer.js  or those of an explorer, one choice at a time (``ringsim.explore``),
    widget.js    or, in a notebook, those that the kernel sends (``notebook``)
"""
