"""Whole experiments from one file: a graph of steps, each of which runs once."""
