"""From a checked message to a finished answer: validation, admission, fan-out."""
