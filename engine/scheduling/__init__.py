"""Which requests run in the next step, with which blocks. Pure: no tensors, no clock, no thread."""
