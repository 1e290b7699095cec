"""What every other room may import: errors, plain types, limits, log lines. It imports nothing of ours, and no
torch."""
