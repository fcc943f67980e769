"""Traces: the events of a run, from the ranks' records to tables, files and explanations."""
