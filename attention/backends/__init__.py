"""The attention backends, one module each. `attention.selection` lists them; importing this package imports none."""
