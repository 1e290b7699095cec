"""Who may talk to a process, and how: certificates, roles, keys, limits, and one table of what each caller may do."""
