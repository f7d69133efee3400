"""The console: what the admin port shows of the cluster, as JSON and as a page."""
