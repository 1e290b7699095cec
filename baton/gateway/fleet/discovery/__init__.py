"""Where nodes are, from a setting such as `--decode`: addresses, names, files, and Services of Kubernetes.

sources           the setting's text, as places
directory         the addresses of all places of one setting, now
address_file      a list in a file
endpoint_slices   what the slices of a Service say. Pure
cluster           reads and watches them
"""
