"""How a model is replicated over ranks: DistributedDataParallel."""
