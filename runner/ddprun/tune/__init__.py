"""Search for the settings with which a pipeline trains fastest: by prediction, then by short runs."""


class TuneError(Exception):
    """The search ends here; says why."""
