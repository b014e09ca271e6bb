"""The parts of a step as a report names, groups and draws them, in the order of `PARTS`."""

from typing import Any, NamedTuple


class Part(NamedTuple):
    """One part. Colours are such that colour-blind readers tell them apart (Okabe and Ito,
    https://jfly.uni-koeln.de/color/), and patterns, so that nothing depends on colour alone.
    """

    name: str  # in tables and charts
    category: str
    colour: str
    pattern: str = ""

    @property
    def marker(self) -> dict[str, Any]:
        """The colour and pattern as the `marker` of a plotly bar trace."""
        pattern = {"shape": self.pattern, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,0.45)", "size": 6}
        return {"color": self.colour, "pattern": pattern}


STEP_PARTS = {
    "data_us": Part("loading data", "data", "#999999", "."),
    "forward_us": Part("forward", "compute", "#56B4E9"),
    "backward_us": Part("backward", "compute", "#0072B2"),
    "exposed_hook_us": Part("launch and hooks, exposed", "hook", "#CC79A7", "x"),
    "exposed_wait_us": Part("waiting for the last rank", "wait", "#D55E00", "/"),
    "exposed_wire_us": Part("wire, exposed", "wire", "#E69F00", "\\"),
    "optimizer_us": Part("optimizer", "compute", "#009E73"),
    "sync_us": Part("between steps", "sync", "#F0E442", "-"),
    "other_us": Part("other", "other", "#777777", "+"),
}
