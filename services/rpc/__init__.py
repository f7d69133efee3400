"""The gRPC stubs, generated from `proto/`. Nothing here is written by hand; `make proto` writes it all again."""
