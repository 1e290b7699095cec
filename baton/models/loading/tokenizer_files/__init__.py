"""Tokenizers in other forms than tokenizer.json, converted to it; `find.tokenizer_json` is what others call."""
