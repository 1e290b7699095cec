"""One file per family, read from embedding to logits; `table` lists them."""
