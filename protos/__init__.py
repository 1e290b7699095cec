"""The wire of Baton: the `.proto` files, and the Python code that `make protos` generates next to them."""
