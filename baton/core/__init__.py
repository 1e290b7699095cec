"""The room that every other room may import: errors, plain types, limits, log lines. It imports no other room and no
torch."""
