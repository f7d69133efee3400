"""Model families, one short file each, and the registry that finds them."""
