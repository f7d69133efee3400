"""Sending: arrivals, the streaming HTTP client, load processes and their coordinator."""
