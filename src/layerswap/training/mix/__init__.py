"""Data mixes: sources, filters, shares, and the data card."""
