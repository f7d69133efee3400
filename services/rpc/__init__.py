"""Generated from `proto/`; `make proto` writes these files again."""
