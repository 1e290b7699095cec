"""The backends: one module each, all listed in `attention.selection`. Importing this package imports none of them."""
