"""Decodes over the paged cache: keys split among workers, then merged."""
