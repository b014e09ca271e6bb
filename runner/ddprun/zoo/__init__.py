"""Built-in models and data. Factories take `ddprun.config.built_in_options` as keyword arguments."""
