"""The guides, whose blocks are files of a copy of the source."""

GUIDES = ("docs/adding-a-model.md", "docs/adding-a-backend.md", "docs/adding-a-transport.md")
