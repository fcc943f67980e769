"""Traces: from the records that ranks make during a run to tables, files and explanations."""
