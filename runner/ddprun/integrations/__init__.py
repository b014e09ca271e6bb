"""`ddprun.observe` under frameworks that wrap the model in DistributedDataParallel themselves."""
