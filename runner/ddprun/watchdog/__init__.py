"""Hang diagnosis: a status page and a watchdog in each rank, and one in each launcher."""
