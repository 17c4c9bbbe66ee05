"""Builds the lab that ships with layerswap: its world, its questions, and its models.

`python -m research.lab --help` lists the commands.
"""
