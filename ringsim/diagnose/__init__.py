"""Why a run stopped, or was slow: from what its ranks had posted to findings that read as sentences."""
