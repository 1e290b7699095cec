"""A cluster of real processes under load and faults (`make chaos`): kills, freezes, drains, cut, half-open and slow
networks, deaths at each step of the hand-over, damaged segments.

`scenario.py` draws a run from a seed, `storm.py` injects its faults into `cluster.py`, `load.py` sends the requests of
`works.py`, `history.py` records what happened, and `checker.py` judges only that record.
"""
