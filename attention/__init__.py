"""Layouts, the paged cache, metadata, backends and kernels.

Knows models, requests and transfers not at all: tensors, positions and block tables in, tensors out. Importing this
package imports no torch; its modules other than `blocksparse`, `layout` and `spec` do.
"""
