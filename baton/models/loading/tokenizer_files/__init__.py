"""Converts tokenizers in other formats to tokenizer.json; callers use `find.tokenizer_json`."""
