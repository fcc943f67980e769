"""The interactive view of a run.

The view is one HTML file that works without a network, a server or a library. In a notebook, it is
a widget. ``html`` encodes a trace and writes a page that contains the trace and the program that
shows it. The program is the JavaScript in ``page/``, which consists of plain functions and classes
on Canvas 2D. Each subject has its own file, and the files are concatenated in the order of
``html.PROGRAM``::

    columns.js   reads the bytes; finds lanes on which bars do not overlap, and operations' states
    program.js   finds the time in which a rank ran its own program
    pyramid.js   finds the state that fills most of each time bin, by repeated halving, so that a
                 million events can be drawn
    timeline.js  draws ranks as rows, arrows, the ruler, and the overview
    ring.js      draws the messages and collectives in flight and the waits at one moment, or the
                 matrix for many ranks
    panels.js    shows an event's card, findings, statistics, bandwidths, and the table for screen
                 readers
    steps.js     shows pipeline steps: bubbles and live activations
    waits.js     finds what each rank does at a time, and the ranks that it waits for
    code.js      shows the source code, with each rank's cursor and what it waits for
    main.js      handles the pointer, wheel and keys, searching and playing
    live.js      shows a run that continues
    page.js      shows the traces in a page
    explorer.js  shows the traces in an explorer, one choice at a time (``ringsim.explore``)
    widget.js    shows the traces that the kernel sends to a notebook (``notebook``)
"""
