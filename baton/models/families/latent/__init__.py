"""TODO baton/models/families/latent"""
