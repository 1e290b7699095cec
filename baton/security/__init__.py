"""Authentication, authorization and TLS: certificates, roles, keys, limits, and one table of who may call what."""
