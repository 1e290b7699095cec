"""Converts between text and tokens: tokenizer, detokenizer, stop strings, chat formats."""
