"""Runs work that cannot be interrupted, such as the check of a grammar or the rendering of a template, in a process of
its own whose forks end at a bound of CPU time, memory or time."""
