"""Measuring: records of requests, statistics over them, service level objectives, the summary that `--json` writes."""
