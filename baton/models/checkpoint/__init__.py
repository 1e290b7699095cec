"""Reads the files of a checkpoint and the tensors in them, by name or by a rank's share."""
