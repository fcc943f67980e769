"""Predicting runs.

Constants from a trace, a prediction next to its run, from few ranks to many, and what each rank did
as a program that can run again.
"""
