"""Traces: what happened in a run, from its ranks' records to tables, files and explanations."""
