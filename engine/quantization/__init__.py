"""Weights of eight bits: how they are rounded, loaded and multiplied by, one file a format."""
