"""Starting ranks: real processes, joined in a ring, that run a function and return its results.

``api`` is ``ringsim.trace``. ``job`` packs the function, ``ranks`` gets processes (from a
``forkserver`` on Linux), and ``rank`` is what each of them does. ``supervisor`` follows a run, and
``run`` makes its trace or its error. ``watcher`` finds ranks that are stuck, by what their
``threads`` do, too; ``protocol`` has what it asks and tells them.

``recording`` is for ranks that something else started. ``joined`` watches them, ``hosts`` those of
several hosts. ``block`` has what the ranks of a block share over the store: ``gathering`` brings
their parts to rank 0, ``clocks`` compares their clocks, and ``merging`` writes the file, with their
``ends``.
"""
