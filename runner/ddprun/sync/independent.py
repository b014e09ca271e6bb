"""No synchronisation at all."""

from ddprun.sync.policy import Effect, Policy


class Independent(Policy):
    """Every rank trains by itself. What becomes of that is the next stage's to say; else parameters are
    averaged as they are when the stage ends.
    """

    gradients_everywhere = False
    uses_hooks = False
    never = True

    def synchronises(self, step: int) -> bool:
        """Never."""
        return False

    def after_step(self, step: int) -> Effect:
        """Nothing is exchanged."""
        return "apart"
