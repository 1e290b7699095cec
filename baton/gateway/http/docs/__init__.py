"""The pages for browsers that the gateway writes itself: `/` is about the gateway, `/docs` describes every endpoint.

They need no network, no script and no file.
"""
