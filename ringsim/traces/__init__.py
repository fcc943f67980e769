"""Traces: what happened in a run, from the records of its ranks to tables, files and explanations."""
