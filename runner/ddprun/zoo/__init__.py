"""Built-in models and data. Each factory takes the options of `ddprun.spec.options` as keyword arguments."""
