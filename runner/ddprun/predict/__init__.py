"""How long a step would take over other links and on more ranks, from what a short run has measured."""
