"""Declarative experiments: a graph of steps that are never done twice."""
