"""The model families, one file each, which reads from embedding to logits; `table` lists them."""
