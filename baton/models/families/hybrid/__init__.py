"""Decoders with recurrent layers next to attention."""
