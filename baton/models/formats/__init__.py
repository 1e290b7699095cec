"""TODO baton/models/formats"""
