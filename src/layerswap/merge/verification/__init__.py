"""Verifies an output against its record and its sources."""
