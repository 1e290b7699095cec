"""TODO baton/settings"""
