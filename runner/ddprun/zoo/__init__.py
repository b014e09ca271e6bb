"""Built-in models and data. Each factory takes the options of `ddprun.config.options` as keyword
arguments.
"""
