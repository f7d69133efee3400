"""The layers that the families share."""
