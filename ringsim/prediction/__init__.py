"""Predicting runs.

Constants from a trace, a prediction beside its run, and from few ranks to many.
"""
