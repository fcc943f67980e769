"""Starts ranks: real processes, joined in a ring, that run a function and return its results.

``api`` contains ``ringsim.trace``. ``job`` packs the function, ``ranks`` provides processes (from a
``forkserver`` on Linux), and ``rank`` runs in each of them. ``supervisor`` follows a run, and
``run`` returns its trace or raises its error. ``watcher`` finds stuck ranks, partly from the
activity of their ``threads``; ``protocol`` defines the messages that it exchanges with them.

``recording`` is for ranks started by another launcher. ``joined`` watches them, and ``hosts``
watches ranks on several hosts. ``block`` defines the keys that the ranks of a block share over the
store: ``gathering`` brings their parts to rank 0, ``clocks`` compares their clocks, and ``merging``
writes the file, with the ranks' ``ends``.
"""
