"""Numbers that nodes choose guesses by. `baton plan` simulates nodes with them. Pure."""

# Most guesses for one request and step.
MOST_GUESSES = 16
# Guesses must bring so many times the tokens a second of the plain step: costs are predicted to within a few percent.
LEAST_GAIN = 1.03
# What a step with guesses takes longer than its work, because the host prepares the next step only when it has ended:
# guesses of 32 requests take 0.5 to 1 ms of it, those of one request 0.05 ms, and the step's rows and messages take the
# rest. It is not measured on a device yet.
DEFAULT_OVERHEAD_S = 0.0005
