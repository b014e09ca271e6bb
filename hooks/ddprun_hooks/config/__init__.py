"""What a file may say about hooks. Nothing here imports torch."""
