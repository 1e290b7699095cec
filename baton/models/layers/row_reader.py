"""Modules that can read their input quantized, by the kernel that computes it instead of one of their own."""

from baton.models.kernels.quantized.rows import RowFormat


class RowReader:
    """A module whose first argument is read by one linear layer and by nothing else.

    A class that reads its input in any other way must not have this base, or return None.
    """

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """Returns how the module reads this number of rows; None: it needs a tensor."""
        raise NotImplementedError
