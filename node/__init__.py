"""What the two node processes share: putting engine and transfer together, describing oneself, serving, draining.

The only place that knows `engine` and `kvtransfer` at once; knows neither role.
"""
