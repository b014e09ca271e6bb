"""Built-in models and data. Factories take the options of `ddprun.config.built_ins` as keyword arguments."""
