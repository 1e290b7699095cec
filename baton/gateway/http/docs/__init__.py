"""The pages for browsers that the gateway writes itself: `/` says what answers here, `/docs` describes every endpoint.

They need no network, no script and no file.
"""
