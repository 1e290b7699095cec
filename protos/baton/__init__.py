"""Folder of the proto package `baton`."""
