"""TODO baton/models/families/dense"""
