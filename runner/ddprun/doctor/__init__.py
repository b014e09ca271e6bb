"""`ddprun doctor`: whether this host, and the hosts of a launch together, are fit to run."""
