"""The wire of Baton in Python, generated from the `.proto` files in `protos/` by `make protos`."""
