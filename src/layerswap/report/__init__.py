"""Draws figures and writes HTML reports and tables: plain data in, no network."""
