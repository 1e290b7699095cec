"""Files of a checkpoint and the tensors in them, read by name or by a rank's share."""
