"""Finds nodes from a setting such as `--decode`: addresses, names, files, and Kubernetes Services.

sources           parses the setting into places
directory         resolves all places of one setting to addresses
endpoint_slices   the addresses in the EndpointSlices of a Service. Pure
cluster           reads and watches EndpointSlices
"""
