"""Why a run stopped, or was slow.

From what its ranks had posted to findings that read as sentences.
"""
