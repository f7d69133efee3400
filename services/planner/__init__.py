"""The planner's process: it measures, asks `planner.control`, carries out and tells."""
