"""Starting ranks: real processes, joined in a ring, that run a function and return its results.

``api`` is ``ringsim.trace``. ``job`` packs the function, ``ranks`` gets processes (from a
``forkserver`` on Linux), ``rank`` is what each of them does, ``run`` follows one run and
``watcher`` finds ranks that are stuck in it, by what their ``threads`` do, too. ``recording`` and
``joined`` do the same for ranks that something else started.
"""
