"""Choosing a composition: on one split, by several strategies, and reporting it on another."""
