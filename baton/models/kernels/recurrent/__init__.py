"""TODO baton/models/kernels/recurrent"""
