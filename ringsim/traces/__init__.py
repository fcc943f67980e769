"""Traces: from the ranks' records of a run to tables, files and explanations."""
