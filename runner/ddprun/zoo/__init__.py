"""Built-in models and data. Each factory takes the options of `ddprun.config.built_ins` as keyword
arguments.
"""
