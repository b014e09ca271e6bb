"""How long a step would take over other links and on more ranks, from what a short run has measured."""


class MeasurementRunError(Exception):
    """The short run failed; with the end of what it printed."""
