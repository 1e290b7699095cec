"""The documentation: its commands run, its guides work, its tables are those of the code, its links lead somewhere."""
