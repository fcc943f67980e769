"""Starting ranks: real processes, joined in a ring, that run one function and hand back what they did.

``api`` is the door (``ringsim.trace``). Behind it: ``job`` packs the function, ``launcher`` gets ranks (``forkserver`` on
Linux, ``portable`` elsewhere), ``run`` watches one run, ``rank`` is what happens inside a rank, ``failure`` turns several errors
into the one that matters.
"""
