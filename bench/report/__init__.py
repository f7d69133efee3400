"""Showing: the terminal while a run lasts and after it, plots, and the HTML report."""
