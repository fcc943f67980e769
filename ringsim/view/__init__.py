"""The interactive view of a run.

One HTML file that needs no network, no server and no library; in notebooks, a widget. ``html``
turns a trace into bytes and puts them into a page with the program that shows them. The program is
the JavaScript in ``page/``: plain functions and classes on Canvas 2D, one file a subject, put
behind one another in the order of ``html.PROGRAM``::

    columns.js   reads the bytes; lanes, in which bars do not overlap; what an operation did when
    pyramid.js   which state fills most of each bin of time, by halves: what to draw of a million
                 events
    timeline.js  rows of ranks, pixels, arrows, the ruler, the overview
    ring.js      messages on their way at one moment; the matrix of many ranks
    panels.js    the card of an event, findings, statistics, bandwidths, the table for readers of
                 screens
    steps.js     steps of a pipeline: bubbles, live activations
    critical.js  the critical path
    main.js      pointer, wheel, keys, search, playing
    page.js      shows the traces of a page
    explorer.js  or those of an explorer, a choice each (``ringsim.explore``)
    widget.js    or, in a notebook, those that the kernel sends (``notebook``)
"""
