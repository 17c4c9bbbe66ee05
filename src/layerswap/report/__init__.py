"""Draws figures and writes HTML reports and tables from plain data, without the network."""
