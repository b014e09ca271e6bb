"""The built-in sync policies, one a file: options, and a plan made of them. Nothing here imports torch."""
