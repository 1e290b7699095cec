"""Attention whose sums have one order: a token has the same bits as a decode and in any chunk of a prompt."""
