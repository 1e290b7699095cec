"""TODO baton/models/families/hybrid"""
